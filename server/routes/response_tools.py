"""Tools of /v1/responses: their form for the template, their echo, and the parsing of the answer.

Owner: loop. In: ResponsesBody. Out: a ToolTable, the tools for the echo, and a Parsing; a choice of an unknown tool is
refused. Tools that only OpenAI's servers run are left out, and named to the client.
"""

from __future__ import annotations

from typing import Any

from server.errors import invalid
from server.http.exchange import Exchange
from server.output.parser import Parsing
from server.render.errors import kind_of
from server.render.items import grammar_syntax, listed_tools, read_response_tools
from server.routes.endpoint import one_of
from server.routes.tools import ToolTable, allowed_tools, check_calls, check_name, leave_out, nothing_to_call
from server.schema.responses import InputBody, ResponsesBody
from server.state import AppState
from server.structure.tool_structure import Calls


def check_tools(exchange: Exchange, body: InputBody, calls_back: bool = True) -> tuple[ToolTable, list[dict[str, Any]]]:
    """The known tools with the calls that the request allows, and all tools for the echo."""
    known, echoed, dropped = read_response_tools(body.tools)
    leave_out(exchange, dropped)
    state, choice = exchange.state, body.tool_choice
    if isinstance(choice, str):
        one_of("tool_choice", choice, ("none", "auto", "required"))
    elif choice is not None and not isinstance(choice.get("type"), str):
        got = kind_of(choice.get("type"))
        raise invalid("tool_choice.type", f"tool_choice.type: got {got}; must be a string, such as function")
    only: frozenset[str] | None = None
    most = 1 if body.parallel_tool_calls is False else 0
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice, only = allowed_tools(choice, "tool_choice", known, is_hosted=is_hosted)
        if choice == "required" and not only:
            raise nothing_to_call(dropped)
    may_call = choice != "none" and calls_back
    must = choice not in (None, "none", "auto")
    check_calls(state, body.tools, known, must_call=must, may_call=may_call, dropped=dropped)
    if isinstance(choice, dict):
        if choice["type"] not in ("function", "custom"):
            raise nothing_to_call([choice["type"]])
        most = 1
        only = frozenset((check_name("tool_choice.name", choice.get("name"), known),))
    calls = Calls(choice != "none", must, only, most)
    return ToolTable.of(state, known or None, calls), echoed


def is_hosted(tool: dict[str, Any]) -> bool:
    """Whether a choice names a tool that only OpenAI's servers run."""
    return isinstance(tool.get("type"), str) and tool["type"] not in ("function", "custom", "namespace")


def note_unenforced(exchange: Exchange, body: ResponsesBody, calls: Calls) -> None:
    """Add a header for custom tools with a Lark grammar, which is not enforced; coding clients send such a tool with
    every request.
    """
    if calls.may and any(grammar_syntax(tool) == "lark" for tool, _, _ in listed_tools(body.tools)):
        exchange.headers.append((b"x-structured-relaxed", b"format"))
        exchange.state.metrics.relax(("format",))


def parsing_for(state: AppState, body: ResponsesBody, tools: ToolTable) -> Parsing | None:
    """The parsing of the answer's text."""
    return tools.parsing(state, id_prefix="call_", shows_special=body.skip_special_tokens is False)
