"""The bodies of /tokenize, /detokenize (API.md section 16) and /abort_requests."""

from __future__ import annotations

from typing import Any

import msgspec


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either `prompt`, or `messages` and what goes with them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class AbortBody(msgspec.Struct, kw_only=True):
    request_ids: list[str]
