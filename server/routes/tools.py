"""Tools of a request: what the template sees, and the refusal of calls that this server cannot parse.

Owner: loop. In: the tools and the choice of any dialect, read by its route. Out: tools for the template, or a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.errors import invalid, not_here, shown
from server.state import AppState

Tool = dict[str, Any]


def check_calls(
    sent: Sequence[Any] | None,
    kept: Sequence[Tool] | None,
    *,
    must_call: bool,
    may_call: bool,
    named: tuple[str, Any] | None = None,
) -> None:
    """Refuses a choice that cannot be met, and tools where a call may come back.

    `sent` are the client's tools, `kept` those that this server knows, `named` is the field that names one of them and
    its value.
    """
    if must_call and not sent:
        raise invalid("tool_choice", "tool_choice: asks for a call, but there are no tools")
    if named is not None:
        param, name = named
        if name not in [tool["function"]["name"] for tool in kept or ()]:
            raise invalid(param, f"{param}: {shown(name)} is not among the tools")
    if kept and may_call:
        raise not_here("tools", "tools: this server cannot parse tool calls; send tool_choice none, or no tools")


def offered(state: AppState, tools: list[Tool] | None, choice: Any) -> list[Tool] | None:
    """The tools that the template sees."""
    return None if choice == "none" and state.config.chat.exclude_tools_when_tool_choice_none else tools
