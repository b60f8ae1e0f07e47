"""The bodies of SGLang's routes (https://docs.sglang.io/basic_usage/sampling_params.html)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema import fields
from server.schema.fields import said

Items = str | dict[str, Any] | list[str | dict[str, Any] | list[str | dict[str, Any]] | None]
EACH = "one for all prompts, or a list with one for each prompt"


class SglangBody(msgspec.Struct, kw_only=True):
    """The body of /generate. For lists of prompts most fields may be lists, too."""

    text: Annotated[str | list[str] | None, said("The prompt as text, or prompts.", "The capital of France is")] = None
    input_ids: Annotated[
        list[int | list[int]] | None, said("The prompt as token ids, or prompts; in place of text.", [1, 2, 3])
    ] = None
    sampling_params: Annotated[
        dict[str, Any] | list[dict[str, Any]] | None,
        said(f"How to sample, in SGLang's words: {EACH}.", {"max_new_tokens": 16, "temperature": 0}),
    ] = None
    stream: fields.Stream = None
    return_logprob: Annotated[
        bool | list[bool] | None, said(f"Whether tokens have log-probabilities: {EACH}.", True)
    ] = None
    logprob_start_len: Annotated[
        int | list[int] | None,
        said(f"The first token of the prompt with log-probabilities; -1: only tokens of the answer; {EACH}.", 0),
    ] = None
    top_logprobs_num: Annotated[
        int | list[int] | None, said(f"Number of likeliest tokens to report at each place: {EACH}.", 2)
    ] = None
    token_ids_logprob: Annotated[
        list[int | list[int] | None] | None,
        said("Token ids whose log-probabilities are reported at each place, or a list for each prompt."),
    ] = None
    return_text_in_logprobs: Annotated[bool | None, said("Whether log-probabilities have the tokens' texts.")] = None
    return_routed_experts: fields.ReturnRoutedExperts = None
    return_progress: fields.ReturnProgress = None
    image_data: Annotated[
        Items | None, said("The images of the prompt, as URLs or base64, or a list for each prompt.")
    ] = None
    audio_data: Annotated[Items | None, said("The recordings of the prompt, in the same form.")] = None
    video_data: Annotated[Items | None, said("The films of the prompt, in the same form.")] = None
    lora_path: Annotated[
        str | list[str | None] | None, said("The name of an adapter, the same for all prompts.", "my-adapter")
    ] = None
    model: fields.Model = None
    rid: Annotated[
        str | list[str] | None, said("The id of the answer, at most 128 printable ASCII characters, or a list of ids.")
    ] = None
    priority: fields.Priority = None
    cache_salt: fields.CacheSalt = None


class SglangAbortBody(msgspec.Struct, kw_only=True):
    """The body of /abort_request."""

    rid: Annotated[str | None, said("The id of the answer to end.", "a1")] = None
    abort_all: Annotated[bool | None, said("Whether every answer of the caller's key ends.")] = None
