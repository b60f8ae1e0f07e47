"""The bodies of /v1/responses and /v1/responses/input_tokens (API.md section 11).

Items, tools and the open-ended objects stay as sent; render/items.py and routes/responses.py read them. Unknown fields
are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class InputBody(msgspec.Struct, kw_only=True):
    """What makes the prompt, of /v1/responses and /v1/responses/input_tokens. `input`: a text, or items."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # no part of OpenAI's API
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None


class ResponsesBody(InputBody, kw_only=True):
    """And what is asked for."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None  # from here on fields that are no part of OpenAI's API
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    return_routed_experts: bool | None = None
