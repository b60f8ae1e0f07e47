"""Tools of a request: their form for the template, the parsing of the answer, and refused choices.

Owner: loop. In: the tools and the tool choice of any API, read by its route. Out: a ToolTable, which the route makes
once and passes on: it has the tools for the template, the sampling and a Parsing for the answer; or a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.errors import ApiError, invalid, not_here, quoted
from server.http.exchange import Exchange
from server.http.foreign_body import report_tools
from server.jobs.sampling import Asked
from server.output.parser import Parsing
from server.render.tools import ToolPlace
from server.routes.endpoint import one_of
from server.state import AppState
from server.structure.tool_structure import Calls, tool_structure

Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolTable:
    """The tools of one request and its choice among them."""

    known: list[Tool] | None  # in the form for templates
    calls: Calls
    offered: list[Tool] | None  # the tools for the template

    @classmethod
    def of(cls, state: AppState, known: list[Tool] | None, calls: Calls) -> ToolTable:
        return cls(known, calls, offered(state, known, calls))

    def parsing(self, state: AppState, **wishes: Any) -> Parsing | None:
        """The parsing of an answer; None if the model's answers are plain text."""
        parsers = state.parsers.that_call() if self.calls.must else state.parsers
        given = self.known if self.known and self.calls.may else None
        if parsers.is_empty:
            return None
        limits = state.config.limits
        bounds = (self.calls.most, self.calls.must, limits.max_tool_calls, limits.max_tool_argument_bytes)
        return Parsing(parsers, given, *bounds, **wishes)

    def holding(self, state: AppState, asked: Asked, places: list[ToolPlace]) -> Asked:
        """The sampling of an answer in which calls are required, or must follow their tools' schemas."""
        if not self.known or not self.calls.may:
            return asked
        parsers = state.parsers.that_call() if self.calls.must else state.parsers
        structure = tool_structure(parsers, self.known, places, self.calls, state.config.limits, asked.structure)
        return asked if structure is asked.structure else replace(asked, structure=structure)


NO_TOOLS = ToolTable(None, Calls(), None)


def check_calls(
    state: AppState,
    sent: Sequence[Any] | None,
    known: Sequence[Tool] | None,
    *,
    must_call: bool,
    may_call: bool,
    dropped: Sequence[str] = (),
) -> None:
    """Refuse a choice that cannot be satisfied, and tools whose calls no parser of the model can read.

    `sent`: the client's tools; `known`: those among them that this server knows; `dropped`: the types of the others.
    """
    if must_call and not sent:
        raise invalid("tool_choice", "tool_choice: asks for a call, but there are no tools")
    if must_call and not known:
        raise nothing_to_call(dropped)
    cannot = not (must_call or state.parsers.can_call)
    if known and may_call and cannot and state.config.chat.tool_call_parser != "none":
        raise not_here(
            "tools",
            "tools: the format of this model's tool calls is not known; send tool_choice none or no tools, or start "
            "the server with --tool-call-parser and its name (none: calls stay text)",
        )


def leave_out(exchange: Exchange, dropped: Sequence[str]) -> None:
    """Name the types of tools that this server does not run to the client."""
    if dropped:
        report_tools(exchange, dropped)


def nothing_to_call(dropped: Sequence[str]) -> ApiError:
    """The refusal of a choice among tools that this server does not run."""
    few = ", ".join(map(quoted, dict.fromkeys(dropped[:8])))
    text = f"tool_choice: asks for a call, but {few} runs at other servers only; send a tool of your own, or auto"
    return invalid("tool_choice", text)


def check_name(param: str, name: Any, known: Sequence[Tool] | None) -> str:
    """A name of one of the tools, sent in the field `param`."""
    names = [tool["function"]["name"] for tool in known or ()]
    if not isinstance(name, str) or name not in names:
        few = ", ".join(map(quoted, names[:8])) or "none"
        raise invalid(param, f"{param}: got {quoted(name)}; must be one of the tools: {few}")
    return name


def allowed_tools(
    said: Any,
    path: str,
    known: Sequence[Tool] | None,
    function_of: Callable[[Tool], Any] = lambda tool: tool,
    is_hosted: Callable[[Tool], bool] = lambda tool: False,
) -> tuple[str, frozenset[str]]:
    """(mode, names) of a choice of type allowed_tools; `function_of` finds the object with an entry's name.

    Entries for which `is_hosted` is true name tools that were left out; they are left out too.
    """
    if not isinstance(said, dict):
        raise invalid(path, f"{path}: must be an object with mode and tools")
    mode, entries = said.get("mode"), said.get("tools")
    one_of(f"{path}.mode", "" if mode is None else mode, ("auto", "required"))
    if not isinstance(entries, list) or not entries:
        raise invalid(f"{path}.tools", f"{path}.tools: must be a list of at least one tool")
    names = set()
    for at, entry in enumerate(entries):
        if isinstance(entry, dict) and is_hosted(entry):
            continue
        function = function_of(entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            raise invalid(f"{path}.tools[{at}]", f"{path}.tools[{at}]: must be an object that names a function")
        names.add(check_name(f"{path}.tools[{at}].name", function.get("name"), known))
    return str(mode), frozenset(names)


def offered(state: AppState, tools: list[Tool] | None, calls: Calls) -> list[Tool] | None:
    """The tools for the template.

    If a call is required, its grammar allows only the permitted tools; the prompt then lists all tools, so that a
    cached prompt still fits. If a call is optional, the template gets only the permitted tools.
    """
    if not tools or (not calls.may and state.config.chat.exclude_tools_when_tool_choice_none):
        return None
    if calls.must or calls.only is None:
        return tools
    return [tool for tool in tools if tool["function"]["name"] in calls.only] or None
