"""/v1/chat/completions (API.md sections 4, 5, 9): validate, render, submit, stream or gather.

Owner: loop. In: ChatBody. Out: one JSON body, or chunks pushed as the engine makes them. Features of the contract that
this server cannot do are refused by name before anything is spent.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from starlette.requests import Request
from starlette.responses import Response

from server.answers import routed
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.answers.respond import answer_with, json_body
from server.errors import invalid, not_here, shown
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import preparing
from server.jobs import media_options, prompt_rows
from server.jobs.job import Job, media_preload, prepare
from server.jobs.media_preload import MediaPreload
from server.jobs.sampling import Asked, in_range, priority_of, resolve, salt_of
from server.output.choices import chat_call, chat_choice, chat_message
from server.output.events import Said
from server.output.logprobs import TokenNames
from server.output.parser import Parsing
from server.render.prompt import Prompt
from server.render.tools import tool_name, tool_place
from server.routes.chunks import ChatChunks, ChatShown, chat_finish
from server.routes.endpoint import check_model, gateway_priority, generating_route, names_of, response_id, side_of
from server.routes.tools import NO_TOOLS, ToolTable, allowed_tools, check_calls, check_name
from server.schema.chat import ChatBody
from server.state import AppState
from server.structure.tool_structure import Calls

# Fields that most requests leave out; `check_special` reads them.
SPECIAL = (
    "functions", "function_call", "modalities", "tools", "tool_choice", "reasoning_effort", "thinking_token_budget",
    "mm_processor_kwargs", "media_io_kwargs", "top_logprobs", "use_beam_search",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


async def create(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, ChatBody, state.config.limits.max_request_bytes)
    model = check_model(state, body.model)
    asked, tools = check(state, body)
    name = response_id("chatcmpl-", body.request_id, exchange)
    names, header = names_of(state, body), gateway_priority(request)

    async def jobs() -> list[Job]:
        return [await prepare_chat(exchange, body, asked, tools, header)]

    def frames(answer: Answer) -> ChatChunks:
        chat = state.config.chat
        named = names_function(body.tool_choice)
        echo = echo_of(state, body) if body.echo else ""
        shown = ChatShown(names, shown_top(body), chat.response_role, echo, chat.reasoning_field, named)
        return ChatChunks(answer, name, model, bool(body.return_token_ids), shown)

    async def response(answer: Answer) -> Response:
        return await json_body(answer, partial(whole, answer, body, name, model, names))

    parsing = parsing_for(state, body, tools) if body.tools or not state.parsers.is_empty else None
    return await answer_with(
        request,
        asked,
        jobs,
        frames,
        response,
        name=name,
        skip_special_tokens=body.skip_special_tokens is not False,
        parsing=parsing,
    )


def parsing_for(state: AppState, body: ChatBody, tools: ToolTable) -> Parsing | None:
    """What the answer's text is searched for."""
    return tools.parsing(
        state,
        continued=text_of(body.messages[-1]) if body.continue_final_message else None,
        shows_special=body.skip_special_tokens is False,
        shows_reasoning=body.include_reasoning is not False,
    )


async def prepare_chat(exchange: Exchange, body: ChatBody, asked: Asked, tools: ToolTable, header: str = "") -> Job:
    """The conversation, ready for the engine; `header` is X-Vllm-Priority."""
    state, ahead = exchange.state, None
    salt = "" if body.cache_salt is None else salt_of(body)
    if any(isinstance(message.get("content"), list) for message in body.messages):
        ahead = media_preload(exchange, salt, media_options.of_request(state, body))
    async with preparing(exchange), ahead or nullcontext():
        prompt = await render(state, body, tools, ahead)
        priority = priority_of(body, state.config, header) if body.priority or header else 0
        return await prepare(exchange, prompt, asked, salt=salt, priority=priority, ahead=ahead)


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
    """The fields of `SPECIAL`; returns the tools among them."""
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, name) is not None:
            raise invalid(name, f"{name}: was replaced by {instead}; send {instead}")
    if set(body.modalities or ()) - {"text"}:
        raise not_here("modalities", f"modalities: got {shown(body.modalities)}; answers are text, so send ['text']")
    tools = ToolTable.of(state, body.tools, calls_of(state, body))
    if body.reasoning_effort is not None and body.reasoning_effort not in EFFORTS:
        got = shown(body.reasoning_effort)
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
    """What the request says of calls: the choice is one of the words, names a function, or lists several."""
    choice = body.tool_choice
    if body.tools is not None and not body.tools:
        raise invalid("tools", "tools: is empty; name at least one tool or leave it out")
    for at, tool in enumerate(body.tools or ()):
        check_function(tool, f"tools[{at}]")
    if choice is not None and choice not in ("auto", "none", "required") and not isinstance(choice, dict):
        raise invalid("tool_choice", f"tool_choice: got {shown(choice)}; must be auto, none, required or a function")
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
    """A tool is a function with a name and, where it has parameters, their schema."""
    function = tool.get("function")
    if function is None and tool.get("type") not in (None, "function"):
        raise invalid(f"{path}.type", f"{path}.type: got {shown(tool['type'])}; this route takes function")
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


async def render(state: AppState, body: ChatBody, tools: ToolTable, ahead: MediaPreload | None) -> Prompt:
    """Media first: their pictures take longer than the text, and the pool begins with what it gets first.

    `ahead` None: no message has parts, so there are no media.
    """
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    marks, generate = None, body.add_generation_prompt
    if ahead is not None:
        marks = await prompt_rows.marked(state, body)
        await ahead.begin(state.renderer.embedded(body.messages))
    return await state.renderer.chat(
        body.messages,
        tools=tools.offered,
        documents=body.documents,
        # On unless switched off, or the last message is to be continued; the renderer refuses to do both.
        add_generation_prompt=not body.continue_final_message if generate is None else generate,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=kwargs,
        chat_template=body.chat_template,
        add_special_tokens=bool(body.add_special_tokens),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side="left" if body.truncation_side is None else side_of(body.truncation_side),
        marks=marks,
    )


def shown_top(body: ChatBody) -> int:
    """How many of an entry's likeliest to show: what was asked for, or all there are when ids were named too."""
    return -1 if body.logprob_token_ids else body.top_logprobs or 0


def echo_of(state: AppState, body: ChatBody) -> str:
    """The text of the last message, if it has the role of the answer."""
    last = body.messages[-1]
    return text_of(last) if last.get("role") == state.config.chat.response_role else ""


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def whole(answer: Answer, body: ChatBody, name: str, model: str, names: TokenNames) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    job, asked = answer.jobs[0], answer.asked
    content: dict[str, Any] = {
        "id": name,
        "object": "chat.completion",
        "created": answer.created,
        "model": model,
        "choices": [whole_choice(answer, choice, body, names) for choice in answer.choices],
        "usage": answer.usage(),
        "system_fingerprint": None,
        "service_tier": None,
        "prompt_logprobs": None,
    }
    prompt_logprobs = answer.prompt_logprobs[0]
    if asked.params.prompt_logprobs is not None and prompt_logprobs is not None:
        content["prompt_logprobs"] = names.prompt(prompt_logprobs)
    if answer.exchange.replaced_frames:
        content["replaced_frames"] = [
            {"item": item, "frames": [{"frame": number, "shown": shown} for number, shown in pairs]}
            for item, pairs in answer.exchange.replaced_frames
        ]
    if body.return_token_ids:
        content["prompt_token_ids"] = job.request.prompt_token_ids.tolist()
    if body.return_prompt_text:
        content["prompt_text"] = job.prompt.text
    return content | routed.of_prompt(answer.choices[0])


def whole_choice(answer: Answer, choice: Choice, body: ChatBody, names: TokenNames) -> dict[str, Any]:
    events, token_ids, entries = choice.drain_events()
    with_logprobs, chat = answer.asked.params.logprobs is not None, answer.state.config.chat
    said = Said(events)
    text = (echo_of(answer.state, body) if body.echo else "") + said.content
    message = chat_message(
        text if text or not (said.reasoning or said.calls) else None,
        role=chat.response_role,
        reasoning=said.reasoning or None,
        reasoning_field=chat.reasoning_field,
        tool_calls=[chat_call(call) for call in said.calls],
    )
    made = chat_choice(
        choice.index,
        message,
        chat_finish(choice, named=names_function(body.tool_choice)),
        choice.stop_reason,
        logprobs=names.chat(entries, shown_top(body)) if with_logprobs else None,
        token_ids=token_ids if body.return_token_ids else None,
    )
    return made | routed.of_answer(choice)


ROUTES = [generating_route("/v1/chat/completions", create)]
