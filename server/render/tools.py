"""Fields of a tool common to every API: its name, whether its schema is enforced, and the schema's path.

Owner: any thread, pure functions. In: fields straight from JSON with the client's own paths. Out: checked values, or
RenderError.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from server.render.errors import escaped, invalid

LONGEST_NAME = 256  # characters of a tool's name


class ToolPlace(NamedTuple):
    """Strictness and path of one tool in the form for templates."""

    strict: bool
    path: str  # path of its parameters in the client's request


def tool_name(name: Any, path: str) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
        allowed = f"a string of 1 to {LONGEST_NAME} characters that are not all white space"
        raise invalid(f"{path}.name: got {escaped(name)}; must be {allowed}", f"{path}.name")
    return name


def tool_place(tool: dict[str, Any], path: str, schema: str) -> ToolPlace:
    """The ToolPlace of a tool; `schema`: the API's name of the parameters' field."""
    strict = tool.get("strict")
    if not isinstance(strict, bool | None):
        raise invalid(f"{path}.strict: got {escaped(strict)}; must be true or false", f"{path}.strict")
    return ToolPlace(strict is True, f"{path}.{schema}")
