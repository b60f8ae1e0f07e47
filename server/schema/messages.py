"""The bodies of /v1/messages and /v1/messages/count_tokens (API.md section 12).

Messages, system blocks and tools stay as sent; render/blocks.py reads them. Unknown fields, betas among them, are
ignored by the decoder.
"""

from __future__ import annotations

from typing import Any

import msgspec


class CountBody(msgspec.Struct, kw_only=True):
    """What makes the prompt."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class MessagesBody(CountBody, kw_only=True):
    """And what is asked for."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    thread: dict[str, Any] | None = None  # refused: a conversation that the server keeps
    output_format: dict[str, Any] | None = None  # the older place of output_config.format
    return_routed_experts: bool | None = None
