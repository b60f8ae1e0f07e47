"""Anthropic messages: roles and blocks, read into a Conversation; and tools in the form for chat templates.

Owner: any thread, pure functions. In: `system` and `messages` straight from JSON (API.md section 12), unchecked;
unknown fields of blocks are ignored. Out: a Conversation, or RenderError with the client's own path. A system text that
begins with the billing header is dropped: it changes with every request, so the prefix cache could hold nothing after
it.
"""

from __future__ import annotations

import re
from typing import Any

from server.render.conversation import Conversation, Part, text_part
from server.render.errors import RenderError, invalid, kind_of, quoted, untyped
from server.render.tools import ToolPlace, tool_name, tool_place

BILLING = "x-anthropic-billing-header"
BLOCKS = "text, image, document, search_result, thinking, tool_use, tool_result, tool_reference, compaction"
# Blocks that only Anthropic's servers write and read; histories from there contain them, next to ordinary text blocks.
HOSTED = frozenset({"redacted_thinking", "container_upload", "fallback", "mcp_tool_listing"})
_IMAGE_TYPE = re.compile(r"^image/[a-z0-9.+-]{1,64}$")


def read_blocks(system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]) -> Conversation:
    """Read the whole conversation."""
    if not messages:
        raise invalid("messages: is empty; send at least one message", "messages")
    conversation = Conversation()
    conversation.system(system_parts(system, "system"), "system")
    for at, message in enumerate(messages):
        path = f"messages[{at}]"
        role, content = message.get("role"), message.get("content")
        if role == "system":
            conversation.system(system_parts(content, f"{path}.content"), path)
        elif role == "user":
            _user(conversation, _blocks(content, f"{path}.content"), path)
        elif role == "assistant":
            _assistant(conversation, _blocks(content, f"{path}.content"), path)
        else:
            got = quoted(role) if isinstance(role, str) else kind_of(role)
            raise invalid(f"{path}.role: got {got}; must be user, assistant or system", f"{path}.role")
    conversation.close()
    return conversation


def is_prefill(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last message."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def prefilled(messages: list[dict[str, Any]]) -> str | None:
    """The text that the answer continues; None if the answer begins a new message."""
    if not is_prefill(messages):
        return None
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "".join(str(block.get("text", "")) for block in blocks if isinstance(block, dict))


def system_parts(content: Any, path: str) -> list[Part]:
    if content is None:
        return []
    parts = [_text(block, path) for block, path in _blocks(content, path)]
    return [part for part in parts if not part.content["text"].startswith(BILLING)]


def _blocks(content: Any, path: str) -> list[tuple[dict[str, Any], str]]:
    """(block, path) of each block. A string is one text block; blocks for Anthropic's servers only are left out."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, path)] if content else []
    if not isinstance(content, list):
        raise invalid(f"{path}: got {kind_of(content)}; must be a string or a list of blocks", path)
    for at, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"{path}[{at}]: got {untyped(block)}; must be an object with a type", f"{path}[{at}]")
    return [(block, f"{path}[{at}]") for at, block in enumerate(content) if not _is_hosted_block(block["type"])]


def _is_hosted_block(kind: str) -> bool:
    """Whether only Anthropic's servers read a block: web_search_tool_result, server_tool_use and similar, but not the
    calls that a client runs.
    """
    return kind in HOSTED or kind.endswith(("_tool_use", "_tool_result"))


def _user(conversation: Conversation, blocks: list[tuple[dict[str, Any], str]], path: str) -> None:
    parts: list[Part] = []
    said = False  # a user message may hold only results
    for block, where in blocks:
        if block["type"] == "tool_result":
            if parts:
                conversation.user(parts, path)
                parts = []
            conversation.result(_string(block, "tool_use_id", where), _result_parts(block, where), where)
            said = True
        else:
            parts += _part(block, where)
    if parts or not said:
        conversation.user(parts, path)


def _result_parts(block: dict[str, Any], path: str) -> list[Part]:
    content = block.get("content")
    parts: list[Part] = []
    for inner, where in _blocks("" if content is None else content, f"{path}.content"):
        parts += _part(inner, where)
    if block.get("is_error") is True:
        at = next((at for at, part in enumerate(parts) if part.kind == "text"), None)
        if at is None:
            parts.insert(0, text_part("Error", path))
        else:
            text = parts[at]
            parts[at] = text_part("Error: " + text.content["text"], text.path, text.held)
    return parts


def _assistant(conversation: Conversation, blocks: list[tuple[dict[str, Any], str]], path: str) -> None:
    conversation.assistant([], path)
    for block, where in blocks:
        kind = block["type"]
        if kind == "thinking":
            thought = text_part(_string(block, "thinking", where), where, f"{where}.thinking")
            conversation.assistant([], path, reasoning=thought)
        elif kind == "tool_use":
            given = block.get("input")
            if given is not None and not isinstance(given, dict):
                raise invalid(f"{where}.input: got {kind_of(given)}; must be an object", f"{where}.input")
            conversation.call(_string(block, "id", where), _string(block, "name", where), given or {}, where)
        else:
            conversation.assistant(_part(block, where), path)


def _part(block: dict[str, Any], path: str) -> list[Part]:
    """A block of content as parts of a chat message."""
    kind = block["type"]
    if kind == "text":
        return [_text(block, path)]
    if kind == "image":
        url, held = _image_url(block, path)
        return [Part({"type": "image_url", "image_url": {"url": url}}, path, held)]
    if kind == "document":
        return _document(block, path)
    if kind == "search_result":
        heads = [key for key in ("title", "source") if isinstance(block.get(key), str)]
        parts = [text_part(block[key], path, f"{path}.{key}") for key in heads]
        return parts + [_text(inner, at) for inner, at in _blocks(block.get("content"), f"{path}.content")]
    if kind == "compaction":  # the summary of earlier messages; null if there is none
        return [] if block.get("content") is None else [text_part(_string(block, "content", path), path)]
    if kind == "tool_reference":
        return [text_part(_string(block, "tool_name", path), path, f"{path}.tool_name")]
    raise invalid(f"{path}.type: {quoted(kind)} is not taken here; known blocks are {BLOCKS}", f"{path}.type")


def _text(block: dict[str, Any], path: str) -> Part:
    if block["type"] != "text":
        raise invalid(f"{path}.type: got {quoted(block['type'])}; must be text", f"{path}.type")
    # A string in place of a block has no field of its own.
    return text_part(_string(block, "text", path), path, f"{path}.text" if path.endswith("]") else path)


def _string(block: dict[str, Any], key: str, path: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise invalid(f"{path}.{key}: got {kind_of(value)}; must be a string", f"{path}.{key}")
    return value


def _source(block: dict[str, Any], path: str) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise invalid(f"{path}.source: got {kind_of(source)}; must be an object with a type", f"{path}.source")
    return source


def _image_url(block: dict[str, Any], path: str) -> tuple[str, str]:
    """(the picture as a URL, the path of the URL or of its base64)."""
    source, where = _source(block, path), f"{path}.source"
    if source.get("type") == "url":
        return _string(source, "url", where), f"{where}.url"
    if source.get("type") == "base64":
        kind = _string(source, "media_type", where)
        if not _IMAGE_TYPE.match(kind):
            raise invalid(f"{where}.media_type: got {quoted(kind)}; must be such as image/png", f"{where}.media_type")
        return f"data:{kind};base64,{_string(source, 'data', where)}", f"{where}.data"
    given = source.get("type")
    got = quoted(given) if isinstance(given, str) else kind_of(given)
    raise invalid(f"{where}.type: got {got}; must be base64 or url", f"{where}.type")


def _document(block: dict[str, Any], path: str) -> list[Part]:
    """The parts of a document: title and context, then plain text or blocks."""
    source, where = _source(block, path), f"{path}.source"
    heads = [key for key in ("title", "context") if isinstance(block.get(key), str)]
    parts = [text_part(block[key], path, f"{path}.{key}") for key in heads]
    kind = source.get("type")
    if kind == "text":
        return [*parts, text_part(_string(source, "data", where), path, f"{where}.data")]
    if kind == "content":
        for inner, at in _blocks(source.get("content"), f"{where}.content"):
            parts += _part(inner, at)
        return parts
    raise RenderError(
        400, "media_unsupported", f"{where}.type: only text and content are read; send the document as text", where
    )


def tool_places(tools: list[dict[str, Any]] | None) -> list[ToolPlace]:
    """The ToolPlace of each tool that `read_tools` returns."""
    return [
        tool_place(tool, f"tools[{at}]", "input_schema") for at, tool in enumerate(tools or ()) if not _is_hosted(tool)
    ]


def _is_hosted(tool: dict[str, Any]) -> bool:
    """Whether only Anthropic's servers run this tool."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind != "custom" and tool.get("input_schema") is None


def read_tools(tools: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """(tools in the form for templates, types of dropped server tools)."""
    held: list[dict[str, Any]] = []
    dropped: list[str] = []
    for at, tool in enumerate(tools or ()):
        path = f"tools[{at}]"
        schema = tool.get("input_schema")
        if _is_hosted(tool):
            dropped.append(tool["type"])
            continue
        if schema is not None and not isinstance(schema, dict):
            raise invalid(f"{path}.input_schema: got {kind_of(schema)}; must be an object", f"{path}.input_schema")
        function: dict[str, Any] = {"name": tool_name(tool.get("name"), path)}
        if tool.get("description") is not None:
            function["description"] = _string(tool, "description", path)
        function["parameters"] = schema or {"type": "object", "properties": {}}
        held.append({"type": "function", "function": function})
    return held, dropped
