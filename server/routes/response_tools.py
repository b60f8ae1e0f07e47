"""Tools of /v1/responses: what the template sees, what is echoed, and what is looked for in the answer.

Owner: loop. In: ResponsesBody. Out: Tools, Calls and a Parsing; a choice that names no tool is refused. Tools that only
OpenAI's servers run are left out with a warning.
"""

from __future__ import annotations

import logging
from typing import Any

from server.errors import invalid
from server.output.parser import Parsing
from server.render.items import read_response_tools
from server.routes.endpoint import one_of
from server.routes.tools import check_calls, parsing_of
from server.schema.responses import ResponsesBody
from server.state import AppState
from server.tool_structure import Calls

log = logging.getLogger("omniloop")

Tools = tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]  # for the template; as echoed


def most_calls(body: ResponsesBody) -> int:
    """Calls that the client takes; 0: any number."""
    return 1 if body.parallel_tool_calls is False or isinstance(body.tool_choice, dict) else 0


def check_tools(state: AppState, body: ResponsesBody) -> tuple[Tools, Calls]:
    """Tools for the template and for the echo, and what the request says of calls."""
    kept, echoed, dropped = read_response_tools(body.tools)
    if dropped:
        log.warning("%d tools that only OpenAI's servers run were left out of a request", dropped)
    choice = body.tool_choice
    if isinstance(choice, str):
        one_of("tool_choice", choice, ("none", "auto", "required"))
    elif choice is not None and not isinstance(choice.get("type"), str):
        raise invalid("tool_choice.type", "tool_choice.type: must be a string")
    must_call = choice == "required" or isinstance(choice, dict)
    by_name = isinstance(choice, dict) and choice["type"] in ("function", "custom")
    named = ("tool_choice.name", choice.get("name")) if isinstance(choice, dict) and by_name else None
    check_calls(state, body.tools, kept, must_call=must_call, may_call=choice != "none", named=named)
    name = None if named is None else str(named[1])
    must = bool(kept) and (choice == "required" or by_name)
    return (kept or None, echoed), Calls(choice != "none", must, name, most_calls(body))


def parsing_for(state: AppState, body: ResponsesBody, tools: Tools, calls: Calls) -> Parsing | None:
    """What the answer's text is searched for."""
    return parsing_of(
        state,
        tools[0],
        calls,
        id_prefix="call_",
        shows_special=body.skip_special_tokens is False,
    )
