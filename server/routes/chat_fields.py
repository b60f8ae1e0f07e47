"""Checks the fields of a chat before the template runs.

Owner: loop. In: ChatBody. Out: the sampling that the request asks for, and its tools. Features of the API that this
server does not have are refused by name before any work is done.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

from server.errors import invalid, not_here, quoted
from server.jobs import media_options
from server.jobs.sampling import Asked, in_range, resolve
from server.render.tools import tool_name, tool_place
from server.routes.tools import NO_TOOLS, ToolTable, allowed_tools, check_calls, check_name
from server.schema.chat import ChatBody
from server.state import AppState
from server.structure.tool_structure import Calls

# Fields that most requests leave out, read by `check_special`.
SPECIAL = (
    "functions", "function_call", "modalities", "tools", "tool_choice", "reasoning_effort", "thinking_token_budget",
    "mm_processor_kwargs", "media_io_kwargs", "top_logprobs", "use_beam_search",
)  # fmt: skip


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def check(state: AppState, body: ChatBody) -> tuple[Asked, ToolTable]:
    """The sampling and the tools; refuses everything that can be refused before the template runs."""
    if not body.messages:
        raise invalid("messages", "messages: is empty; send at least one message")
    is_special = any(getattr(body, name) is not None for name in SPECIAL)
    tools = check_special(state, body) if is_special else NO_TOOLS
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, name)
    if max_tokens is not None:
        in_range(name, max_tokens, 1, 2**31 - 1)
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    asked = resolve(body, logprobs, max_tokens, state.defaults, state.config, state.vocabulary)
    if body.thinking_token_budget is not None and body.thinking_token_budget != -1:
        asked = replace(asked, thinking_budget=body.thinking_token_budget)
    if not body.tools:
        return asked, tools
    places = [tool_place(tool["function"], f"tools[{at}].function", "parameters") for at, tool in enumerate(body.tools)]
    return tools.holding(state, asked, places), tools


def check_special(state: AppState, body: ChatBody) -> ToolTable:
    """Check the fields of `SPECIAL`; returns the tools among them."""
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, name) is not None:
            raise invalid(name, f"{name}: was replaced by {instead}; send {instead}")
    if set(body.modalities or ()) - {"text"}:
        raise not_here("modalities", f"modalities: got {quoted(body.modalities)}; answers are text, so send ['text']")
    tools = ToolTable.of(state, body.tools, calls_of(state, body))
    if body.reasoning_effort is not None and body.reasoning_effort not in EFFORTS:
        got = quoted(body.reasoning_effort)
        raise invalid("reasoning_effort", f"reasoning_effort: got {got}; must be one of {', '.join(EFFORTS)}")
    budget = body.thinking_token_budget
    if budget is not None:
        in_range("thinking_token_budget", budget, -1, 2**31 - 1)
        if body.use_beam_search and budget >= 0:
            raise invalid("thinking_token_budget", "thinking_token_budget: not with use_beam_search")
    if body.mm_processor_kwargs or body.media_io_kwargs:
        media_options.of_request(state, body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs: needs logprobs: true")
    if body.use_beam_search and body.tools:
        raise invalid("use_beam_search", "use_beam_search: not with tools")
    if body.top_logprobs is not None and state.config.limits.max_logprobs != -1:
        in_range("top_logprobs", body.top_logprobs, 0, state.config.limits.max_logprobs)
    return tools


def calls_of(state: AppState, body: ChatBody) -> Calls:
    """The calls that the request allows: tool_choice is one of the words, names a function, or lists several."""
    choice = body.tool_choice
    if body.tools is not None and not body.tools:
        raise invalid("tools", "tools: is empty; name at least one tool or leave it out")
    for at, tool in enumerate(body.tools or ()):
        check_function(tool, f"tools[{at}]")
    if choice is not None and choice not in ("auto", "none", "required") and not isinstance(choice, dict):
        raise invalid("tool_choice", f"tool_choice: got {quoted(choice)}; must be auto, none, required or a function")
    name, only = None, None
    if names_function(choice):
        name = named_by(choice)
        only = frozenset((name,))
    elif isinstance(choice, dict):
        path = "tool_choice.allowed_tools"
        choice, only = allowed_tools(choice.get("allowed_tools"), path, body.tools, lambda tool: tool.get("function"))
    most = 1 if name is not None or body.parallel_tool_calls is False else 0
    calls = Calls(choice != "none", name is not None or choice == "required", only, most)
    check_calls(state, body.tools, body.tools, must_call=calls.must, may_call=calls.may)
    if name is not None:
        check_name("tool_choice", name, body.tools)
    return calls


def check_function(tool: dict[str, Any], path: str) -> None:
    """Check a tool: a function with a name and, if it has parameters, their schema."""
    function = tool.get("function")
    if function is None and tool.get("type") not in (None, "function"):
        raise invalid(f"{path}.type", f"{path}.type: got {quoted(tool['type'])}; this route takes function")
    if not isinstance(function, dict):
        raise invalid(f"{path}.function", f"{path}.function: must be an object with a name")
    tool_name(function.get("name"), f"{path}.function")
    if not isinstance(function.get("parameters"), dict | None):
        raise invalid(f"{path}.function.parameters", f"{path}.function.parameters: must be an object")


def names_function(choice: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a tool_choice names the function to call."""
    return isinstance(choice, dict) and choice.get("type") != "allowed_tools"


def named_by(choice: dict[str, Any]) -> str:
    """The function that a tool_choice names."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid("tool_choice.function", "tool_choice.function: must be an object with the name of a tool")
    return name
