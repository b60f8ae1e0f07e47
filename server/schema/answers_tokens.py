"""Types of the answers of /inference/v1/generate, the render routes, /tokenize and /detokenize (API.md section 16)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema.answers_common import (
    ABSENT,
    Answer,
    ChoiceLogprobs,
    FinishReason,
    Maybe,
    Measured,
    Progressing,
    PromptLogprobs,
    PromptRouted,
    Routed,
    StopReason,
    Usage,
)
from server.schema.fields import said
from server.schema.generate import Features

RequestId = Annotated[str, said("The id of the request.")]


class TokensChoice(Answer):
    """One of the answers as token ids; in a stream, its new tokens."""

    index: Annotated[int, said("The number of the choice, from 0.", 0)]
    token_ids: Annotated[list[int], said("The tokens.", [1, 2, 3])]
    finish_reason: FinishReason
    stop_reason: StopReason
    logprobs: Annotated[ChoiceLogprobs | None, said("Log-probabilities, where they were asked for.")]
    text: Annotated[Maybe[str], said("The tokens as text, where output_mode is text.")] = ABSENT
    routed_experts: Routed = ABSENT


class Generated(Answer):
    """Finished answers as token ids."""

    request_id: RequestId
    choices: Annotated[list[TokensChoice], said("The answers.")]
    usage: Annotated[Usage, said("Counts of tokens.")]
    prompt_logprobs: Annotated[PromptLogprobs | None, said("Candidates at each place of the prompt, where asked for.")]
    metrics: Measured = ABSENT
    prompt_routed_experts: PromptRouted = ABSENT


class GeneratedChunk(Answer):
    """An event of streamed answers as token ids; the stream ends with the text [DONE]."""

    request_id: RequestId
    choices: Annotated[list[TokensChoice], said("What is new; empty in the chunk with the counts.")]
    usage: Annotated[Maybe[Usage], said("The counts of the whole answer, in the last chunk.")] = ABSENT
    metrics: Measured = ABSENT
    prompt_progress: Progressing = ABSENT
    prompt_routed_experts: PromptRouted = ABSENT


class Rendered(Answer):
    """A request as token ids, in the form that /inference/v1/generate takes."""

    request_id: RequestId
    token_ids: Annotated[list[int], said("The prompt.", [1, 2, 3])]
    model: Annotated[str, said("The served name that was asked for.", "qwen3-8b")]
    sampling_params: Annotated[dict[str, Any], said("The sampling fields that were sent, and the defaults.")]
    features: Annotated[Features | None, said("The media of the prompt.")]
    stream: Annotated[bool, said("Whether the request asked for a stream.")]
    cache_salt: Annotated[str | None, said("The salt of the request.")]
    priority: Annotated[int, said("The priority of the request.", 0)]


class TokenPiece(Answer):
    """A token and its text, in llama.cpp's form."""

    id: Annotated[int, said("The token id.", 1)]
    piece: Annotated[str | list[int], said("Its text, or its bytes if they are no whole characters.", "Hello")]


class Tokenized(Answer):
    """A text or a conversation as token ids."""

    count: Annotated[int, said("The number of tokens.", 3)]
    max_model_len: Annotated[int, said("The context length.", 8192)]
    tokens: Annotated[list[int | TokenPiece], said("The token ids, or objects with with_pieces.", [1, 2, 3])]
    token_strs: Annotated[Maybe[list[str]], said("The tokens as the tokenizer writes them, where asked for.")] = ABSENT


class Detokenized(Answer):
    """Token ids as a text."""

    prompt: Annotated[str, said("The text.", "Hello")]
    content: Annotated[str, said("The same, by the name of llama.cpp's clients.", "Hello")]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The tokenizer's settings: the fields of the checkpoint's tokenizer_config.json without paths, and the
    fields below.
    """

    eos_token: Annotated[str | None, said("The token that ends a text.")]
    bos_token: Annotated[str | None, said("The token that begins a text.")]
    pad_token: Annotated[str | None, said("The token that fills.")]
    chat_template: Annotated[str | None, said("The chat template in use.")]
    vocab_size: Annotated[int, said("One more than the highest token id.", 151936)]
