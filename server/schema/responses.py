"""The bodies of /v1/responses and /v1/responses/input_tokens (API.md section 11).

Items, tools and the open-ended objects stay as sent; render/items.py and routes/responses.py read them. Unknown fields
are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema import fields
from server.schema.fields import said


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Annotated[
        str | None, said("How long the model thinks: none, minimal, low, medium, high, xhigh or max.", "low")
    ] = None
    summary: Annotated[str | None, said("The kind of summary that is wanted; returned without effect.")] = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: Annotated[
        dict[str, Any] | None,
        said("The form of the answer: an object of type text, json_object or json_schema.", {"type": "text"}),
    ] = None
    verbosity: Annotated[str | None, said("How long the answer is meant to be; returned without effect.")] = None


class InputBody(msgspec.Struct, kw_only=True):
    """The fields that make the prompt, of /v1/responses and /v1/responses/input_tokens. `input`: a text, or items."""

    input: Annotated[
        str | list[dict[str, Any]],
        said("A text, or items: messages, calls, results of calls, reasoning.", "What is 12 + 30?"),
    ]
    model: fields.Model = None
    instructions: Annotated[
        str | None, said("Instructions before the input; not taken over from the previous response.", "Be brief.")
    ] = None
    chat_template_kwargs: fields.ChatTemplateKwargs = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        said("The tools that the model may call; functions are flat: name, parameters, strict."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        said("Whether tools are called: auto, none, required, or an object that names a tool.", "auto"),
    ] = None
    parallel_tool_calls: fields.ParallelToolCalls = None
    text: Annotated[TextOptions | None, said("The form of the answer.")] = None
    reasoning: Annotated[ReasoningOptions | None, said("How the model thinks.")] = None
    truncation: Annotated[
        str | None, said("Whether an input that is too long is cut (auto) or refused (disabled).", "disabled")
    ] = None
    previous_response_id: Annotated[str | None, said("The id of the stored response that this one continues.")] = None
    conversation: Annotated[
        str | dict[str, Any] | None, said("Refused: this server stores responses, not conversations.")
    ] = None
    prompt: Annotated[dict[str, Any] | None, said("Refused: this server stores no prompts.")] = None


class SampledInput(InputBody, kw_only=True):
    """The fields of SamplerFields: a msgspec struct has one base."""

    dry_multiplier: fields.DryMultiplier = None
    dry_base: fields.DryBase = None
    dry_allowed_length: fields.DryAllowedLength = None
    dry_penalty_last_n: fields.DryPenaltyLastN = None
    dry_sequence_breakers: fields.DrySequenceBreakers = None
    top_n_sigma: fields.TopNSigma = None
    xtc_probability: fields.XtcProbability = None
    xtc_threshold: fields.XtcThreshold = None


class ResponsesBody(SampledInput, kw_only=True):
    """The fields of the prompt and of the answer."""

    max_output_tokens: Annotated[int | None, said("Most tokens to generate.", 256)] = None
    temperature: fields.Temperature = None
    top_p: fields.TopP = None
    top_k: fields.TopK = None
    min_p: fields.MinP = None
    presence_penalty: fields.PresencePenalty = None
    frequency_penalty: fields.FrequencyPenalty = None
    repetition_penalty: fields.RepetitionPenalty = None
    seed: fields.Seed = None
    stop: fields.Stop = None
    stop_token_ids: fields.StopTokenIds = None
    include_stop_str_in_output: fields.IncludeStopStrInOutput = None
    ignore_eos: fields.IgnoreEos = None
    logit_bias: fields.LogitBias = None
    structured_outputs: fields.StructuredOutputs = None
    skip_special_tokens: fields.SkipSpecialTokens = None
    priority: fields.Priority = None
    cache_salt: fields.CacheSalt = None
    stream: fields.Stream = None
    store: Annotated[bool | None, said("Whether the response can be read and continued later.", True)] = None
    include: Annotated[
        list[str] | None, said("Parts to add: message.output_text.logprobs, reasoning.encrypted_content.")
    ] = None
    top_logprobs: Annotated[
        int | None, said("Number of likeliest tokens to report at each place, where log-probabilities are included.")
    ] = None
    metadata: Annotated[
        dict[str, str] | None, said("The caller's texts by name; returned unchanged.", {"topic": "sums"})
    ] = None
    background: Annotated[bool | None, said("Whether the answer is made without a waiting client; needs store.")] = None
    user: Annotated[str | None, said("An identifier of the caller's user; returned unchanged.")] = None
    prompt_cache_key: Annotated[str | None, said("A key of the caller's cache; returned unchanged.")] = None
    return_routed_experts: fields.NoRoutedExperts = None
    return_progress: fields.ReturnProgress = None
