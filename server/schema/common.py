"""Fields that chat and completions share.

Owner: none, values made by http/body.py. Every field is optional and None when absent or null. server/jobs/sampling.py
checks ranges and contradictions, and has the defaults.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema import fields
from server.schema.fields import said
from server.schema.samplers import SamplerFields


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: Annotated[
        bool | None, said("Whether a last event holds the token counts of the whole answer.", True)
    ] = None
    continuous_usage_stats: Annotated[bool | None, said("Whether each event holds the token counts so far.")] = None


class RepetitionFields(msgspec.Struct, kw_only=True):
    """`repetition_detection`."""

    max_pattern_size: Annotated[int | None, said("Most tokens of a repeated pattern.", 20)] = None
    min_pattern_size: Annotated[int | None, said("Fewest tokens of a repeated pattern.", 1)] = None
    min_count: Annotated[
        int | None, said("Times that a pattern is repeated before the answer ends, at least 2.", 4)
    ] = None


class SamplingFields(SamplerFields, kw_only=True):
    """The fields of API.md section 4 that both generation routes take."""

    model: fields.Model = None
    max_tokens: Annotated[
        int | None, said("Most tokens to generate; the rest of the context where it is absent.", 64)
    ] = None
    temperature: fields.Temperature = None
    top_p: fields.TopP = None
    top_k: fields.TopK = None
    min_p: fields.MinP = None
    presence_penalty: fields.PresencePenalty = None
    frequency_penalty: fields.FrequencyPenalty = None
    repetition_penalty: fields.RepetitionPenalty = None
    seed: fields.Seed = None
    n: Annotated[int | None, said("Number of answers to one prompt.", 1)] = None
    stop: fields.Stop = None
    stop_token_ids: fields.StopTokenIds = None
    include_stop_str_in_output: fields.IncludeStopStrInOutput = None
    ignore_eos: fields.IgnoreEos = None
    min_tokens: Annotated[int | None, said("Fewest tokens to generate before the answer may end.")] = None
    logit_bias: fields.LogitBias = None
    allowed_token_ids: Annotated[list[int] | None, said("The only token ids that may be generated.")] = None
    bad_words: Annotated[
        list[str] | None, said("Words that are not generated, with and without a blank before them.")
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        said("Number of likeliest tokens to report for each token of the prompt; -1 means all; not with stream."),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None, said("Token ids whose log-probabilities are reported at each place, at most 128.")
    ] = None
    stream: fields.Stream = None
    stream_options: Annotated[StreamOptions | None, said("What a stream reports in addition to the answer.")] = None
    stream_interval: Annotated[int | None, said("Tokens in each event of a stream, at least 1.")] = None
    response_format: Annotated[
        dict[str, Any] | None,
        said(
            "The form of the answer: text, json_object, or json_schema with a schema that the answer matches.",
            {"type": "json_object"},
        ),
    ] = None
    structured_outputs: fields.StructuredOutputs = None
    add_special_tokens: fields.AddSpecialTokens = None
    skip_special_tokens: fields.SkipSpecialTokens = None
    spaces_between_special_tokens: Annotated[
        bool | None, said("Accepted for compatibility; the text of special tokens is not separated.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, said("Most tokens of the prompt; a longer prompt is cut; -1 means the context length.")
    ] = None
    truncation_side: Annotated[str | None, said("The side on which a long prompt is cut: left or right.", "left")] = (
        None
    )
    priority: fields.Priority = None
    cache_salt: fields.CacheSalt = None
    request_id: fields.RequestId = None
    return_token_ids: Annotated[
        bool | None, said("Whether the answer has the token ids of the prompt and of each choice.")
    ] = None
    return_routed_experts: fields.ReturnRoutedExperts = None
    return_progress: fields.ReturnProgress = None
    return_tokens_as_token_ids: Annotated[
        bool | None, said("Whether log-probabilities name tokens as token_id:NUMBER.")
    ] = None
    use_beam_search: Annotated[bool | None, said("Whether the answers are found by beam search of width n.")] = None
    length_penalty: Annotated[
        float | None, said("Exponent of the length by which beam search divides scores.", 1.0)
    ] = None
    repetition_detection: Annotated[
        RepetitionFields | None, said("Ends an answer that repeats itself, with the finish reason repetition.")
    ] = None
