"""What every dialect says of a tool: its name, whether its calls are held to its schema, and where that schema stands.

Owner: any thread, pure functions. In: fields straight from JSON with the client's own paths. Out: checked values, or
RenderError.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from server.render.errors import escaped, invalid

LONGEST_NAME = 256  # characters of a tool's name


class ToolPlace(NamedTuple):
    """Of one tool as templates know it."""

    strict: bool
    path: str  # of its parameters, as the client reads it


def tool_name(name: Any, path: str) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
        allowed = f"a string of 1 to {LONGEST_NAME} characters that are not all white space"
        raise invalid(f"{path}.name: got {escaped(name)}; must be {allowed}", f"{path}.name")
    return name


def tool_place(tool: dict[str, Any], path: str, schema: str) -> ToolPlace:
    """`schema` is the name that the dialect gives to the parameters."""
    strict = tool.get("strict")
    if not isinstance(strict, bool | None):
        raise invalid(f"{path}.strict: got {escaped(strict)}; must be true or false", f"{path}.strict")
    return ToolPlace(strict is True, f"{path}.{schema}")
