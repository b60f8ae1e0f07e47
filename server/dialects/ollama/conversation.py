"""Ollama's messages as chat messages: images become parts, and calls get ids.

Owner: loop, pure functions. In: messages of a body. Out: messages for server/routes/chat.py, and a context in which
errors name the client's own paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mm.errors import MediaError
from server.dialects.ollama.schema import OllamaCall, OllamaMessage
from server.render.errors import RenderError

PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\](?:\.image_url(?:\.url)?)?")
CONTENT = re.compile(r"messages\[\d+\](?:\.content)?")


def chat_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages in the form of /v1/chat/completions."""
    waiting: list[tuple[str, str]] = []  # (id, name) of calls without a result
    found = []
    for at, message in enumerate(messages):
        made: dict[str, Any] = {"role": message.role, "content": content_of(message.content or "", message.images)}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call_{at}_{number}" for number, call in enumerate(message.tool_calls)]
            made["tool_calls"] = [call_of(call_id, call) for call_id, call in zip(ids, message.tool_calls)]
            waiting = [(call_id, call.function.name) for call_id, call in zip(ids, message.tool_calls)]
        if message.role == "tool":
            made |= result_of(message, waiting)
        found.append(made)
    return found


def content_of(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """A text, or parts: the images, then the text."""
    if not images:
        return text
    # The bytes decide about the format, whatever the type says.
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in images]
    return [*parts, {"type": "text", "text": text}]


def call_of(call_id: str, call: OllamaCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or {}}
    return {"id": call_id, "type": "function", "function": function}


def result_of(message: OllamaMessage, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """The id and the name of a result's call, which is taken out of `waiting`: the named one, or else the first."""
    ids = [call_id for call_id, name in waiting if message.tool_name in (None, name)]
    call_id = message.tool_call_id or next(iter(ids or [call_id for call_id, _ in waiting]), None)
    name = message.tool_name or next((name for known, name in waiting if known == call_id), None)
    waiting[:] = [pair for pair in waiting if pair[0] != call_id]
    return {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value is not None}


@contextmanager
def client_paths(root: str = "") -> Iterator[None]:
    """A context in which errors of rendering and of loading media name the client's images; `root`: the field that
    holds the text, where the client sent no messages.
    """

    def image(found: re.Match[str]) -> str:
        return f"images[{found[2]}]" if root else f"messages[{found[1]}].images[{found[2]}]"

    def path(text: str) -> str:
        text = PART.sub(image, text)
        return CONTENT.sub(root, text) if root else text

    try:
        yield
    except (RenderError, MediaError) as error:
        error.message = path(error.message)
        error.param = path(error.param) if error.param else error.param
        raise
