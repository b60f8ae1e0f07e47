"""The response object: its name, and the fields of the request that it repeats.

Owner: loop. In: ResponsesBody and its checked tools. Out: a ResponseObject, to which the answer adds its items.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from server.answers.response_items import ResponseObject
from server.http.exchange import Exchange
from server.jobs.sampling import Asked
from server.output.logprobs import TokenNames
from server.render.items import known_tools
from server.schema.responses import ResponsesBody


def echoed_format(asked: dict[str, Any] | None) -> dict[str, Any]:
    """`text.format` in the form of the official client's types: flat and with a name, even if chat's form was sent."""
    if not asked:
        return {"type": "text"}
    inner = asked.get("json_schema") if asked.get("type") == "json_schema" else None
    flat = {"type": "json_schema", **inner} if isinstance(inner, dict) else asked
    if flat.get("type") != "json_schema" or isinstance(flat.get("name"), str):
        return flat
    return {**flat, "name": "response"}


def shape_of(
    exchange: Exchange, body: ResponsesBody, model: str, asked: Asked, echoed: list[dict[str, Any]]
) -> ResponseObject:
    """The response object with all echoed fields."""
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {key: choice[key] for key in ("type", "name", "mode", "tools", "server_label") if key in choice}
    text, reasoning = body.text, body.reasoning
    verbosity = {"verbosity": text.verbosity} if text and text.verbosity else {}
    name = f"resp_{exchange.request_id}"
    state = exchange.state
    if state.responses.get(exchange.key_name, name):  # the client has used this id before
        name = f"resp_{uuid4().hex}"
    echo = {
        "created_at": int(time.time()),
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "service_tier": None,
        "store": body.store is not False,
        "temperature": asked.params.temperature,
        "text": {"format": echoed_format(text.format if text else None), **verbosity},
        "tool_choice": choice or "auto",
        "tools": echoed,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": asked.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    names = TokenNames(state.tokenizer, state.config.chat.return_tokens_as_token_ids)
    shape = ResponseObject(name, echo, names, body.top_logprobs or 0, known_tools(echoed))
    shape.seals = "reasoning.encrypted_content" in (body.include or ())
    return shape
