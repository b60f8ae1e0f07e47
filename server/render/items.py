"""Responses items: messages, calls and their outputs, read into a Conversation; and tools in the form for templates.

Owner: any thread, pure functions. In: `instructions` and items straight from JSON (API.md section 11), unchecked;
earlier items come from stored responses. Out: a Conversation, or RenderError with the client's own path. Items of tools
that only OpenAI's servers run are left out.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from server.render.anchors import unanchored
from server.render.conversation import Conversation, Part, text_part
from server.render.errors import invalid, kind_of, quoted, untyped
from server.render.tools import ToolPlace, tool_name, tool_place

Item = dict[str, Any]

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
HOSTED_ITEMS = frozenset({
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call", "computer_call_output",
    "file_search_call", "image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_approval_request",
    "mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output", "shell_call",
    "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call",
})  # fmt: skip
ITEMS = "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning"
SEAL = b"omniloop:"  # prefix of the text in `sealed`
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def as_items(value: str | list[Item]) -> list[Item]:
    """A list of items; a text becomes one user message."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def references(items: list[Item]) -> list[str]:
    """Ids of earlier items to which these items refer."""
    return [_id(item) for item in items if is_reference(item)]


def read_items(
    instructions: str | None, earlier: list[Item], given: str | list[Item], known: dict[str, Item] | None = None
) -> Conversation:
    """Read the whole conversation; `known`: items to which references may refer."""
    conversation = Conversation()
    if instructions:
        conversation.system([text_part(instructions, "instructions")], "instructions")
    for item in earlier:
        _item(conversation, item, "previous_response_id")
    if isinstance(given, str):
        conversation.user(parts_of(given, "input"), "input")
    elif not given:
        raise invalid("input: is empty; send a text or at least one item", "input")
    for at, item in enumerate(() if isinstance(given, str) else given):
        path = f"input[{at}]"
        if is_reference(item):
            found = (known or {}).get(_id(item))
            if found is None:
                raise invalid(f"{path}.id: names no stored item; send the item itself", f"{path}.id")
            item = found
        _item(conversation, item, path)
    conversation.close()
    if not any(turn.role not in ("system", "developer") for turn in conversation.turns):
        raise invalid("input: holds no message; send a text or a message of the user", "input")
    return conversation


def resolved(given: str | list[Item], known: dict[str, Item]) -> list[Item]:
    """The items of a request for storage, with references replaced by their items."""
    return [known.get(_id(item), item) if is_reference(item) else item for item in as_items(given)]


def listed(items: list[Item], key: str) -> list[Item]:
    """Items as responses list them: each with a type and an id, texts as parts; generated ids contain `key`."""
    found: list[Item] = []
    names: set[str] = set()
    for at, item in enumerate(items):
        kind, content = item.get("type") or "message", item.get("content")
        name = _id(item)
        if not name or name in names:  # clients repeat items
            name = f"{kind}_{key}_{at}"
        names.add(name)
        written = {**item, "type": kind, "id": name, "status": item.get("status") or "completed"}
        if kind == "message" and isinstance(content, str):
            said = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
            written["content"] = [{**said, "text": content}]
        found.append(written)
    return found


def is_reference(item: Item) -> bool:
    """Whether an item is a reference; an item with only an id needs no type."""
    kind = item.get("type")
    return kind == "item_reference" or (
        kind is None and isinstance(item.get("id"), str) and item.keys() <= {"id", "type"}
    )


def _id(item: Item) -> str:
    value = item.get("id")
    return value if isinstance(value, str) else ""


def _item(conversation: Conversation, item: Item, path: str) -> None:
    kind = item.get("type")
    if kind is None or kind == "message":
        _message(conversation, item, path)
    elif kind in ("function_call", "custom_tool_call"):
        space, call_id, name = item.get("namespace"), _string(item, "call_id", path), _string(item, "name", path)
        name = f"{space}__{name}" if isinstance(space, str) and space else name
        custom = kind == "custom_tool_call"
        arguments = {"input": _string(item, "input", path)} if custom else _string(item, "arguments", path)
        conversation.call(call_id, name, arguments, path)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        parts = parts_of(item.get("output"), f"{path}.output")
        conversation.result(_string(item, "call_id", path), parts, path)
    elif kind == "reasoning":
        _reasoning(conversation, item, path)
    elif not isinstance(kind, str) or kind not in HOSTED_ITEMS:
        got = quoted(kind) if isinstance(kind, str) else "no string"
        raise invalid(f"{path}.type: got {got}; known items are {ITEMS}", f"{path}.type")


def _message(conversation: Conversation, item: Item, path: str) -> None:
    role = item.get("role")
    parts = parts_of(item.get("content"), f"{path}.content")
    if role == "user":
        conversation.user(parts, path)
    elif role == "assistant":
        conversation.assistant(parts, path)
    elif role in ("system", "developer"):
        if any(part.kind != "text" for part in parts):
            raise invalid(f"{path}.content: only text is taken in a {role} message", f"{path}.content")
        conversation.system(parts, path, role)
    else:
        got = quoted(role) if isinstance(role, str) else kind_of(role)
        raise invalid(f"{path}.role: got {got}; must be user, assistant, system or developer", f"{path}.role")


def _reasoning(conversation: Conversation, item: Item, path: str) -> None:
    """Read a reasoning item: its text; otherwise the sealed text; otherwise the summary."""
    for key in ("content", "encrypted_content", "summary"):
        value = item.get(key)
        if key == "encrypted_content":
            if text := unsealed(value):
                conversation.assistant([], path, reasoning=text_part(text, path, f"{path}.{key}"))
                return
            continue
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
            raise invalid(f"{path}.{key}: got {kind_of(value)}; must be a list of objects with a text", f"{path}.{key}")
        if value:
            text = "\n".join(_string(part, "text", f"{path}.{key}[{at}]") for at, part in enumerate(value))
            conversation.assistant([], path, reasoning=text_part(text, path, f"{path}.{key}"))
            return


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`, which some clients send back in place of the text. It is encoded, not
    secret.
    """
    return base64.b64encode(SEAL + text.encode(errors="replace")).decode()


def unsealed(blob: Any) -> str:
    """The text of a `sealed` blob; "" for another server's blob."""
    try:
        found = base64.b64decode(blob, validate=True) if isinstance(blob, str) else b""
    except ValueError:
        return ""
    return found.removeprefix(SEAL).decode(errors="replace") if found.startswith(SEAL) else ""


def parts_of(content: Any, path: str) -> list[Part]:
    """The parts of a message's or a tool result's content."""
    if isinstance(content, str):
        return [text_part(content, path, path)] if content else []
    if not isinstance(content, list):
        raise invalid(f"{path}: got {kind_of(content)}; must be a string or a list of parts", path)
    return [_part(part, f"{path}[{at}]") for at, part in enumerate(content)]


def _part(part: Any, path: str) -> Part:
    """A part of chat; unknown kinds are left to the renderer, whose error lists the known ones."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(f"{path}: got {untyped(part)}; must be an object with a type", path)
    kind = part["type"]
    if kind in TEXTS:
        key = TEXTS[kind]
        return text_part(_string(part, key, path), path, f"{path}.{key}")
    if kind == "input_image":
        return Part(
            {"type": "image_url", "image_url": {"url": _data(part, "image_url", path)}}, path, f"{path}.image_url"
        )
    if kind == "input_file":
        return Part({"type": "file", "file": {"file_data": _data(part, "file_data", path)}}, path, f"{path}.file_data")
    return Part(part, path)


def _data(part: dict[str, Any], key: str, path: str) -> str:
    value = part.get(key)
    if not isinstance(value, str) or not value:
        given = next((name for name in ("file_url", "file_id") if part.get(name)), "")
        got = "got nothing" if value is None else "got an empty string" if value == "" else "got no string"
        text = f"{given} is not read here; send the data itself" if given else f"{got}; must be a URL"
        raise invalid(f"{path}.{key}: {text}, such as data:image/png;base64,..", f"{path}.{key}")
    return value


def _string(item: Item, key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{path}.{key}: got {kind_of(value)}; must be a string", f"{path}.{key}")
    return value


def read_response_tools(tools: list[Item] | None) -> tuple[list[Item], list[Item], list[str]]:
    """(tools in the form for templates, the same as the response echoes them, types of dropped built-in tools)."""
    held: list[Item] = []
    echoed: list[Item] = []
    dropped: list[str] = []
    for at, tool in enumerate(tools or ()):
        path = f"tools[{at}]"
        space = tool.get("type") == "namespace"
        members = _members(tool, path) if space else [(tool, path, "")]
        read = [_own(*one) for one in members]
        own = [one for one in read if one is not None]
        held += [known for known, _ in own]
        dropped += [one["type"] for (one, *_), made in zip(members, read) if made is None]
        listed = [echo for _, echo in own]
        if space:
            described = "" if tool.get("description") is None else _string(tool, "description", path)
            head = {"type": "namespace", "name": tool["name"], "description": described}
            listed = [{**head, "tools": listed}]
        echoed += listed
    return held, echoed, dropped


def _members(tool: Item, path: str) -> list[tuple[Item, str, str]]:
    """(tool, its path, prefix of its name for templates) of each tool in a namespace."""
    inner = tool.get("tools")
    if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
        raise invalid(f"{path}.tools: got {kind_of(inner)}; must be a list of objects, each a tool", f"{path}.tools")
    prefix = tool_name(tool.get("name"), path) + "__"
    return [(one, f"{path}.tools[{k}]", prefix) for k, one in enumerate(inner)]


def _own(tool: Item, path: str, prefix: str) -> tuple[Item, Item] | None:
    """(a client's tool in the form for templates, the same as echoed); None for a built-in tool."""
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise invalid(f"{path}.type: got {kind_of(kind)}; must be a string", f"{path}.type")
    if kind == "function":
        made = _function(tool, path, prefix)
        return made, {"type": kind, **made["function"], "name": tool["name"], "strict": tool.get("strict") is True}
    if kind != "custom":
        return None
    made = _function({**tool, "parameters": _free_text(tool, path)}, path, prefix)
    form = {"format": tool["format"]} if tool.get("format") else {}
    return made, {"type": kind, "name": tool["name"], "description": tool.get("description"), **form}


def listed_tools(tools: list[Item] | None) -> list[tuple[Item, str, str]]:
    """(tool, its path, prefix of its name for templates) of each tool, including those in namespaces."""
    found: list[tuple[Item, str, str]] = []
    for at, tool in enumerate(tools or ()):
        path = f"tools[{at}]"
        found += _members(tool, path) if tool["type"] == "namespace" else [(tool, path, "")]
    return found


def tool_places(tools: list[Item] | None) -> list[ToolPlace]:
    """The ToolPlace of each tool in the form for templates."""
    found: list[ToolPlace] = []
    for tool, path, _ in listed_tools(tools):
        if tool["type"] == "custom":
            found.append(ToolPlace(grammar_syntax(tool) == "regex", f"{path}.format"))
        elif tool["type"] == "function":
            found.append(tool_place(tool, path, "parameters"))
    return found


def grammar_syntax(tool: Item) -> str:
    """The syntax of a custom tool's grammar, regex or lark; "" if its input is any text."""
    form = tool.get("format")
    is_grammar = tool.get("type") == "custom" and isinstance(form, dict) and form.get("type") == "grammar"
    return str(form.get("syntax")) if is_grammar and isinstance(form, dict) else ""


def _free_text(tool: Item, path: str) -> Item:
    """The parameters of a custom tool: one text. Inside JSON, only a regular expression can restrict it, no
    other grammar.
    """
    form = tool.get("format")
    if form is not None and (not isinstance(form, dict) or form.get("type") not in ("text", "grammar")):
        if not isinstance(form, dict):
            raise invalid(
                f"{path}.format: got {_got(form)}; must be an object of the type text or grammar", f"{path}.format"
            )
        raise invalid(f"{path}.format.type: got {_got(form.get('type'))}; must be text or grammar", f"{path}.format")
    syntax = grammar_syntax(tool)
    if not syntax:
        return FREE_TEXT
    definition = tool["format"].get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str) or not definition:
        wrong = "definition" if syntax in ("lark", "regex") else "syntax"
        needed = "lark or regex" if wrong == "syntax" else "the grammar's text, which is not empty"
        got = _got(tool["format"].get(wrong))
        raise invalid(f"{path}.format.{wrong}: got {got}; must be {needed}", f"{path}.format")
    if syntax == "lark":
        return FREE_TEXT
    held = {"type": "string", "pattern": f"^(?:{unanchored(definition)})$"}
    return {**FREE_TEXT, "properties": {"input": held}}


def _got(value: Any) -> str:
    """A field's value for an error text."""
    if value is None:
        return "nothing"
    return quoted(value if isinstance(value, str) else json.dumps(value, default=str))


def known_tools(echoed: list[Item]) -> dict[str, Item]:
    """name for the model -> the client's tool, for tools in a namespace and tools with free text."""
    found: dict[str, Item] = {}
    for tool, _, prefix in listed_tools(echoed):
        if prefix or tool["type"] == "custom":
            space = {"namespace": prefix.removesuffix("__")} if prefix else {}
            found[prefix + tool["name"]] = {"type": tool["type"], "name": tool["name"], **space}
    return found


def _function(tool: Item, path: str, prefix: str = "") -> Item:
    function: Item = {"name": prefix + tool_name(tool.get("name"), path)}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", path)
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{path}.parameters: got {kind_of(parameters)}; must be an object", f"{path}.parameters")
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
