"""Fields that chat and completions share.

Owner: none, values made by http/body.py. Every field is optional and None when absent or null; ranges and
contradictions are the business of server/jobs/sampling.py, which also knows the defaults.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionFields(msgspec.Struct, kw_only=True):
    """`repetition_detection`."""

    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """API.md section 4, the part that both generation routes take."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    repetition_detection: RepetitionFields | None = None
    guided_json: Any = None  # these four hold nobody to anything; structure/structure.py warns
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
