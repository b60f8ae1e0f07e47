"""Tools of /v1/responses: their form for the template, their echo, and the parsing of the answer.

Owner: loop. In: ResponsesBody. Out: a ToolTable, the tools for the echo, and a Parsing; a choice of an unknown tool is
refused. Tools that only OpenAI's servers run are left out with a warning.
"""

from __future__ import annotations

import logging
from typing import Any

from server.errors import invalid
from server.http.exchange import Exchange
from server.output.parser import Parsing
from server.render.errors import kind_of
from server.render.items import grammar_syntax, listed_tools, read_response_tools
from server.routes.endpoint import one_of
from server.routes.tools import ToolTable, allowed_tools, check_calls, check_name
from server.schema.responses import InputBody, ResponsesBody
from server.state import AppState
from server.structure.tool_structure import Calls

log = logging.getLogger("omniloop")


def check_tools(state: AppState, body: InputBody, calls_back: bool = True) -> tuple[ToolTable, list[dict[str, Any]]]:
    """The known tools with the calls that the request allows, and all tools for the echo."""
    known, echoed, dropped = read_response_tools(body.tools)
    if dropped:
        log.warning("%d tools that only OpenAI's servers run were left out of a request", dropped)
    choice = body.tool_choice
    if isinstance(choice, str):
        one_of("tool_choice", choice, ("none", "auto", "required"))
    elif choice is not None and not isinstance(choice.get("type"), str):
        got = kind_of(choice.get("type"))
        raise invalid("tool_choice.type", f"tool_choice.type: got {got}; must be a string, such as function")
    only: frozenset[str] | None = None
    most = 1 if body.parallel_tool_calls is False else 0
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice, only = allowed_tools(choice, "tool_choice", known, is_hosted=is_hosted)
    may_call = choice != "none" and calls_back
    check_calls(state, body.tools, known, must_call=choice not in (None, "none", "auto"), may_call=may_call)
    must = choice == "required" and (only is None or bool(only))
    if isinstance(choice, dict):
        must, most = choice["type"] in ("function", "custom"), 1
        only = frozenset((check_name("tool_choice.name", choice.get("name"), known),)) if must else None
    calls = Calls(choice != "none", must and bool(known), only, most)
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
