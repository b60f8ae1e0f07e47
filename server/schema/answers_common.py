"""Types shared by several answers: counts, log-probabilities, experts, errors.

All types of answers (answers_*.py) are documentation that tests enforce: handlers build dicts, /openapi.json is made
from these types, and the tests decode the answers with them. A field that an answer may lack is Maybe.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from server.schema.fields import said

T = TypeVar("T")
Maybe: TypeAlias = T | UnsetType
ABSENT = UNSET


class Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all answers, which have no fields other than those declared."""


Id = Annotated[str, said("The id of the answer.", "chatcmpl-5f0c")]
Created = Annotated[int, said("When the answer was begun, in seconds since 1970.", 1790000000)]
ModelName = Annotated[str, said("The served name that was asked for.", "qwen3-8b")]
FinishReason = Annotated[
    Literal["stop", "length", "tool_calls", "abort", "repetition", "error"] | None,
    said("Why the choice ended; null while it goes on.", "stop"),
]
StopReason = Annotated[
    int | str | None, said("The stop token or the stop text that ended the choice; null at the model's own end.")
]
TokenIds = Annotated[Maybe[list[int]], said("The tokens of the choice, where return_token_ids is set.", [1, 2, 3])]
PromptTokenIds = Annotated[Maybe[list[int]], said("The tokens of the prompt, where return_token_ids is set.")]


class PromptTokensDetails(Answer):
    """Parts of the prompt's tokens."""

    cached_tokens: Annotated[int, said("Tokens that the prefix cache had.", 0)]
    multimodal_tokens: Annotated[dict[str, int] | None, said("Tokens of media by modality; null without media.")]


class CompletionTokensDetails(Answer):
    """Parts of the generated tokens."""

    reasoning_tokens: Annotated[int, said("Tokens of thinking.", 0)]


class Usage(Answer):
    """Counts of tokens."""

    prompt_tokens: Annotated[int, said("Tokens of the prompts, media included; each prompt counts once.", 20)]
    completion_tokens: Annotated[int, said("Generated tokens of all choices, the ending ones included.", 3)]
    total_tokens: Annotated[int, said("The sum of both.", 23)]
    prompt_tokens_details: Annotated[PromptTokensDetails, said("Parts of the prompt's tokens.")]
    completion_tokens_details: Annotated[CompletionTokensDetails, said("Parts of the generated tokens.")]


Histogram = Annotated[list[int], said("Steps by their number of right drafts, from 0.", [5, 2, 1, 4])]


class SpeculativeDecoding(Answer):
    """Counts of the drafts of one answer."""

    mean_acceptance_length: Annotated[float, said("Tokens per step with drafts: 1, and the right drafts.", 2.33)]
    draft_acceptance_rate: Annotated[float, said("The share of the drafts that were right.", 0.44)]
    acceptance_histogram: Histogram
    acceptance_histogram_by_draft_length: Annotated[
        dict[str, list[int]], said("The same for the steps of each number of drafts.", {"3": [5, 2, 1, 4]})
    ]
    num_spec_steps: Annotated[int, said("Steps that verified drafts.", 12)]
    num_accepted_draft_tokens: Annotated[int, said("Drafts that were right.", 16)]
    num_draft_tokens: Annotated[int, said("Drafts that were verified.", 36)]
    num_spec_tokens: Annotated[int, said("Most drafts of a step.", 3)]
    per_step_accepted: Annotated[Maybe[list[int]], said("Right drafts by step, with the level detailed.")] = ABSENT
    per_step_drafted: Annotated[Maybe[list[int]], said("Drafts by step, with the level detailed.")] = ABSENT


class AnswerMetrics(Answer):
    """Measurements of one answer."""

    speculative_decoding: Annotated[
        SpeculativeDecoding | None, said("Its drafts; null without drafts, and for several choices or prompts.")
    ]


Measured = Annotated[
    Maybe[AnswerMetrics], said("Measurements of the answer, where --per-request-spec-decode-metrics is set.")
]


class PromptProgress(Answer):
    """How far the computation of a prompt is after a step."""

    total: Annotated[int, said("Tokens of the prompt.", 8192)]
    cache: Annotated[int, said("Of them, tokens that the prefix cache had.", 0)]
    processed: Annotated[int, said("Tokens that are computed, with those of the cache.", 2048)]
    time_ms: Annotated[float, said("Milliseconds since the prompt's first step started.", 40.0)]


Progressing = Annotated[
    Maybe[PromptProgress], said("How far the prompt is, in the chunks before the answer, where return_progress is set.")
]


class TokenValue(Answer):
    """A token and its log-probability."""

    token: Annotated[str, said("The token as text, or as token_id:NUMBER.", "42")]
    logprob: Annotated[float, said("Its log-probability; -9999 stands for minus infinity.", -0.01)]
    bytes: Annotated[list[int], said("The token's bytes, which need not be whole characters.", [52, 50])]


class TokenLogprob(TokenValue):
    """A generated token, its log-probability, and the likeliest tokens at its place."""

    top_logprobs: Annotated[list[TokenValue], said("The likeliest tokens, in falling order.")]


class ChoiceLogprobs(Answer):
    """Log-probabilities of a choice."""

    content: Annotated[list[TokenLogprob], said("An entry for each token.")]


class PromptLogprob(Answer):
    """One candidate at a place of the prompt."""

    logprob: Annotated[float, said("Its log-probability.", -0.5)]
    rank: Annotated[int | None, said("Its rank among all tokens, from 1.", 1)]
    decoded_token: Annotated[str, said("The token as text.", " the")]


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class RoutedExperts(Answer):
    """The experts of tokens: an array [tokens, layers with experts, experts of a token]."""

    data: Annotated[str, said("The array in C order, little-endian, as base64.")]
    dtype: Annotated[str, said("The number format of the array.", "uint8")]
    shape: Annotated[list[int], said("The lengths of the array's axes.", [3, 24, 8])]


Routed = Annotated[Maybe[RoutedExperts], said("The experts of the choice's tokens, where they were asked for.")]
PromptRouted = Annotated[Maybe[RoutedExperts], said("The experts of the prompt's tokens, where they were asked for.")]


class ErrorDetail(Answer):
    """The details of an error."""

    message: Annotated[str, said("What was got, what is allowed, and how to fix it.", "max_tokens: must be at least 1")]
    type: Annotated[str, said("The class of the error.", "BadRequestError")]
    param: Annotated[str | None, said("The field that was wrong.", "max_tokens")]
    code: Annotated[int, said("The HTTP status.", 400)]
    reason: Annotated[str, said("A stable word for the cause.", "invalid_parameter")]


class Error(Answer):
    """A refusal or a fault; routes of the Anthropic protocol answer with MessagesError."""

    error: Annotated[ErrorDetail, said("What went wrong.")]


class MessagesErrorDetails(Answer):
    """Further details of the cause, beyond the protocol's own error types."""

    error_code: Annotated[str, said("A stable word for the cause.", "invalid_parameter")]


class MessagesErrorDetail(Answer):
    """The details of an error, in the Anthropic protocol."""

    type: Annotated[
        Literal[
            "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
            "request_too_large", "rate_limit_error", "api_error", "overloaded_error", "timeout_error",
        ],
        said("The class of the error.", "invalid_request_error"),
    ]  # fmt: skip
    message: Annotated[str, said("What was got, what is allowed, and how to fix it.")]
    details: Annotated[MessagesErrorDetails, said("More of the cause.")]


class MessagesError(Answer, tag_field="type", tag="error"):
    """A refusal or a fault, in the Anthropic protocol."""

    error: Annotated[MessagesErrorDetail, said("What went wrong.")]
    request_id: Annotated[str, said("The id of the request, as in the header x-request-id.")]


class TextError(Answer):
    """A refusal or a fault, in Ollama's protocol."""

    error: Annotated[str, said("What was got, what is allowed, and how to fix it.")]


class TeiError(Answer):
    """An error in the form of text-embeddings-inference."""

    error: Annotated[str, said("The reason, in words.", "inputs: is missing and required")]
    error_type: Annotated[str, said("The kind: Validation, Overloaded, Backend or Unhealthy.", "Validation")]
