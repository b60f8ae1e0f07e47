"""Types of SGLang's answers: documentation that tests enforce, as server/schema/answers_common.py describes."""

from __future__ import annotations

from typing import Annotated, Literal

from server.schema.answers_common import ABSENT, Answer, Maybe, Progressing
from server.schema.fields import said

Triple = list[float | int | str | None]  # log-probability, id, text
Tokens = Annotated[
    Maybe[list[Triple]], said("The log-probability, the id and on request the text of each token.", [[-0.25, 5, None]])
]
Tops = Annotated[Maybe[list[list[Triple] | None]], said("The same of the likeliest tokens of each place.")]


class SglangEnd(Answer):
    """The cause of an end."""

    type: Annotated[Literal["stop", "length", "abort", "repetition", "error"], said("The kind of the cause.", "length")]
    length: Annotated[Maybe[int], said("Tokens of an answer that has the greatest length.", 16)] = ABSENT
    matched: Annotated[Maybe[int | str | None], said("The token or the text that ended the answer.", 2)] = ABSENT
    message: Annotated[Maybe[str], said("A sentence about other causes.")] = ABSENT


class SglangMeta(Answer):
    """Facts about an answer."""

    id: Annotated[str, said("The client's id, or the server's; several answers have numbers.", "a1")]
    finish_reason: Annotated[SglangEnd | None, said("The cause of the end; null while the answer grows.")]
    prompt_tokens: Annotated[int, said("Tokens of the prompt.", 5)]
    completion_tokens: Annotated[int, said("Generated tokens so far.", 16)]
    cached_tokens: Annotated[int, said("Tokens of the prompt that the prefix cache had.", 0)]
    weight_version: Annotated[str, said("The version of the weights.", "default")]
    e2e_latency: Annotated[Maybe[float], said("Seconds from the arrival of the request to its end.", 0.5)] = ABSENT
    input_token_logprobs: Tokens = ABSENT
    input_top_logprobs: Tops = ABSENT
    input_token_ids_logprobs: Tops = ABSENT
    output_token_logprobs: Tokens = ABSENT
    output_top_logprobs: Tops = ABSENT
    output_token_ids_logprobs: Tops = ABSENT
    routed_experts: Annotated[
        Maybe[str],
        said("Experts of each computed token as base64 of little-endian int32 [tokens, layers, experts of a token]."),
    ] = ABSENT


class SglangGenerated(Answer):
    """An answer of /generate, or one event of its stream, which has the whole answer so far."""

    text: Annotated[str, said("The text so far.", " Paris")]
    output_ids: Annotated[list[int], said("Ids of the generated tokens so far.", [5, 6])]
    meta_info: Annotated[SglangMeta, said("Facts about the answer.")]
    index: Annotated[Maybe[int], said("The number of the answer, where there are several.", 0)] = ABSENT
    prompt_progress: Progressing = ABSENT
