"""/v1/messages and /v1/messages/count_tokens (API.md section 12): the Anthropic protocol over the same engine.

Owner: loop; blocks are read in the pool. In: MessagesBody. Out: one JSON body, or events pushed as the engine makes
tokens. Errors have the protocol's own body, made in http/exchange.py. `thinking` sets the template's `enable_thinking`;
its budget applies if the end of the model's reasoning is a token, and is ignored otherwise, since agents send it to
every model.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import Answer
from server.answers.messages import MessageEvents, whole_message
from server.answers.respond import answer_with, json_body
from server.errors import ApiError, invalid, quoted
from server.flags.config import SAMPLERS
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import client_present, preparing
from server.jobs.job import Job, media_preload, prepare
from server.jobs.sampling import Asked, priority_of, resolve, salt_of
from server.render.blocks import is_prefill, prefilled, read_blocks, read_tools, tool_places
from server.render.chat import Renderer
from server.render.errors import kind_of
from server.routes.endpoint import (
    check_model,
    gateway_priority,
    generating_route,
    json_response,
    one_of,
    refuse_experts,
    served_model,
)
from server.routes.tools import ToolTable, check_calls, check_name, leave_out
from server.schema.common import SamplingFields
from server.schema.messages import CountBody, MessagesBody
from server.state import AppState
from server.structure.structure import Structure, format_structure
from server.structure.tool_structure import Calls

THINKING = ("enabled", "disabled", "adaptive", "between_tools")
EFFORTS = ("low", "medium", "high", "xhigh", "max")


async def create(request: Request) -> Response | None:
    exchange = exchange_of(request)
    exchange.headers.append((b"request-id", exchange.request_id.encode()))
    state = exchange.state
    body = await read_json(request, MessagesBody, state.config.limits.max_request_bytes)
    model = await served_model(exchange, body.model)
    asked = check(state, body)
    tools = check_tools(exchange, body, calls_back=True)
    asked = tools.holding(state, asked, tool_places(body.tools))
    name = "msg_" + exchange.request_id
    priority = priority_of(SamplingFields(priority=body.priority), state.config, gateway_priority(request))

    async def jobs() -> list[Job]:
        return [await prompt_of(exchange, body, tools, asked, state.renderer, priority)]

    def frames(answer: Answer) -> MessageEvents:
        return MessageEvents(answer, name, model)

    async def response(answer: Answer) -> Response:
        return await json_body(answer, partial(whole_message, answer, name, model))

    parsing = tools.parsing(
        state,
        continued=prefilled(body.messages),
        id_prefix="toolu_",
        own_ids=False,
    )
    return await answer_with(request, asked, jobs, frames, response, name=name, parsing=parsing)


async def count(request: Request) -> Response:
    """The size of the prompt in tokens, including media, even if it is too long for the context."""
    exchange = exchange_of(request)
    exchange.headers.append((b"request-id", exchange.request_id.encode()))
    state = exchange.state
    body = await read_json(request, CountBody, state.config.limits.max_request_bytes)
    check_model(state, body.model)
    check_prompt_fields(body)
    tools = check_tools(exchange, body, calls_back=False)
    asked = resolve(SamplingFields(), None, 0, state.defaults, state.config, state.vocabulary)
    async with client_present(request):
        with exchange.hold(1, "texts"):
            job = await prompt_of(exchange, body, tools, asked, state.renderer.counting())
    return json_response({"input_tokens": job.num_tokens})


def check(state: AppState, body: MessagesBody) -> Asked:
    """Check everything that can be checked before the template runs; returns the sampling."""
    at_least_one("max_tokens", body.max_tokens)
    if body.thread is not None:
        text = "thread: this server keeps no conversations of messages; send the whole one without thread"
        raise invalid("thread", text, "thread_unsupported_request")
    refuse_experts(body.return_routed_experts)
    check_prompt_fields(body)
    structure = output_structure(state, body)
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        stream=body.stream,
        return_progress=body.return_progress,
        **{name: getattr(body, name) for name in SAMPLERS},
    )
    most = min(body.max_tokens, 2**31 - 1)  # capped to 31 bits, never refused
    try:
        asked = resolve(fields, None, most, state.defaults, state.config, state.vocabulary)
        return replace(asked, structure=structure, thinking_budget=thinking_budget(state, body))
    except ApiError as error:
        if (error.param or "").startswith("stop"):
            raise invalid("stop_sequences", error.message.replace("stop", "stop_sequences", 1)) from None
        raise


def output_structure(state: AppState, body: MessagesBody) -> Structure | None:
    """The structure of `output_config.format`, or of `output_format`, its older name."""
    newer, older = (body.output_config or {}).get("format"), body.output_format
    if newer is not None and older is not None:
        raise invalid(
            "output_format", "output_format: not together with output_config.format; send output_config.format"
        )
    param, asked = ("output_format", older) if newer is None else ("output_config.format", newer)
    if asked is not None and (not isinstance(asked, dict) or asked.get("type") != "json_schema"):
        if not isinstance(asked, dict):
            raise invalid(param, f"{param}: got {kind_of(asked)}; must be an object of the type json_schema")
        given = asked.get("type")
        got = quoted(given) if isinstance(given, str) else kind_of(given)
        raise invalid(f"{param}.type", f"{param}.type: got {got}; must be json_schema")
    return format_structure(asked, param, state.config.limits)


def thinking_budget(state: AppState, body: MessagesBody) -> int | None:
    """`thinking.budget_tokens`, if this server can enforce it for the model."""
    thinking = body.thinking or {}
    if thinking.get("type") != "enabled" or state.grammars is None or not state.parsers.can_end_reasoning:
        return None
    return thinking.get("budget_tokens")


def at_least_one(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise invalid(name, f"{name}: got {quoted(value)}; must be an integer of at least 1")


def check_prompt_fields(body: CountBody) -> None:
    """Check `thinking` and `output_config`, which both routes take."""
    thinking = body.thinking
    if thinking is not None:
        kind, budget = thinking.get("type"), thinking.get("budget_tokens")
        one_of("thinking.type", "" if kind is None else kind, THINKING)
        if budget is not None:
            at_least_one("thinking.budget_tokens", budget)
    config = body.output_config or {}
    effort = config.get("effort")
    if effort is not None and effort not in EFFORTS:
        text = f"output_config.effort: got {quoted(effort)}; must be one of {', '.join(EFFORTS)}"
        raise invalid("output_config.effort", text)


def check_tools(exchange: Exchange, body: CountBody, calls_back: bool) -> ToolTable:
    """The tools that this server knows, and the calls that the request allows."""
    state = exchange.state
    kept, dropped = read_tools(body.tools)
    leave_out(exchange, dropped)
    choice = body.tool_choice or {"type": "auto"}
    kind, name = choice.get("type"), choice.get("name")
    if kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice.type", f"tool_choice.type: got {quoted(kind)}; must be auto, any, tool or none")
    may_call = kind != "none" and calls_back
    check_calls(state, body.tools, kept, must_call=kind in ("any", "tool"), may_call=may_call, dropped=dropped)
    only = frozenset((check_name("tool_choice.name", name, kept),)) if kind == "tool" else None
    one = choice.get("disable_parallel_tool_use")
    if not isinstance(one, bool | None):
        path = "tool_choice.disable_parallel_tool_use"
        raise invalid(path, f"{path}: got {quoted(one)}; must be true or false")
    most = 1 if one or kind == "tool" else 0
    calls = Calls(kind != "none", kind in ("any", "tool"), only, most)
    return ToolTable.of(state, kept or None, calls)


async def prompt_of(
    exchange: Exchange, body: CountBody, tools: ToolTable, asked: Asked, renderer: Renderer, priority: int = 0
) -> Job:
    """The Job of a conversation of blocks, with its media; errors name the client's own fields."""
    state = exchange.state
    salt = salt_of(SamplingFields(cache_salt=body.cache_salt))
    prefill = is_prefill(body.messages)
    async with preparing(exchange):
        in_pool = asyncio.get_running_loop().run_in_executor
        conversation = await in_pool(state.pool, read_blocks, body.system, body.messages)
        if prefill and conversation.turns[-1].calls:
            raise invalid("messages", "messages: the last one holds a tool_use; send its tool_result after it")
        await conversation.settle(state.renderer)
        with conversation.client_paths():
            async with media_preload(exchange, salt) as preload:
                messages = conversation.messages()
                await preload.begin(renderer.embedded(messages))
                prompt = await renderer.chat(
                    messages,
                    tools=tools.offered,
                    add_generation_prompt=not prefill,
                    continue_final_message=prefill,
                    template_kwargs=template_kwargs(body),
                )
                return await prepare(exchange, prompt, asked, salt=salt, priority=priority, preload=preload)


def template_kwargs(body: CountBody) -> dict[str, Any]:
    """Variables of the template; the request's own override those implied by `thinking` and `effort`."""
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kwargs.setdefault("enable_thinking", body.thinking["type"] != "disabled")
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs


ROUTES = [generating_route("/v1/messages", create), generating_route("/v1/messages/count_tokens", count)]
