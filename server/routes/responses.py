"""/v1/responses (API.md section 11): create, and count what a prompt costs; routes/stored_responses.py has the rest.

Owner: loop; items are read in the pool. In: ResponsesBody. Out: one JSON body, events pushed as the engine makes them,
or at once a queued response that goes on in the background. What is stored belongs to the key that made it. Tools that
only OpenAI's servers run are left out with a warning, because coding clients always send them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import Answer
from server.answers.background import Background, detached
from server.answers.respond import answer_with
from server.answers.response_events import ResponseEvents
from server.answers.response_items import ResponseObject
from server.answers.watch_response import WatchedResponse
from server.errors import ApiError, invalid, not_found, not_here, queue_full, shown
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import client_present, preparing
from server.jobs.job import Job, media_preload, prepare, with_grammar
from server.jobs.sampling import Asked, in_range, priority_of, resolve, salt_of
from server.output.logprobs import TokenNames
from server.output.parser import Parsing
from server.output.response_store import Stored, Turn
from server.render.chat import Renderer
from server.render.conversation import Conversation
from server.render.errors import RenderError
from server.render.items import as_items, known_tools, read_items, references, resolved, tool_places
from server.routes.chat import EFFORTS
from server.routes.endpoint import (
    check_model,
    gateway_priority,
    generating_route,
    json_response,
    one_of,
    refuse_experts,
)
from server.routes.response_tools import check_tools, parsing_for, tell_unheld
from server.routes.stored_responses import missing
from server.routes.tools import ToolTable
from server.schema.common import SamplingFields
from server.schema.responses import InputBody, ResponsesBody
from server.state import AppState
from server.structure.structure import format_structure

log = logging.getLogger("omniloop")

LOGPROBS = "message.output_text.logprobs"
INCLUDE = (
    LOGPROBS, "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip
SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logit_bias", "structured_outputs",
)  # fmt: skip
MakePrompt = Callable[[], Awaitable[tuple[Turn, Job]]]


async def create(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, ResponsesBody, state.config.limits.max_request_bytes)
    model = check_model(state, body.model)
    asked = check(state, body)
    tools, echoed = check_tools(state, body)
    tell_unheld(exchange, body, tools.calls)
    asked = tools.holding(state, asked, tool_places(body.tools))
    parsing = parsing_for(state, body, tools)
    parent = earlier(state, exchange.key_name, body.previous_response_id)
    common = SamplingFields(priority=body.priority, cache_salt=body.cache_salt)
    priority, salt = priority_of(common, state.config, gateway_priority(request)), salt_of(common)
    keeps = body.store is not False
    prompt = partial(prompt_of, exchange, body, parent, tools, asked, state.renderer, priority, salt, keeps)
    shape = partial(shape_of, exchange, body, model, asked, echoed)
    if body.background:
        return await in_background(request, body, asked, prompt, shape, parsing)
    reply = Reply(exchange, body, prompt, shape())
    skip_special_tokens = body.skip_special_tokens is not False
    return await answer_with(
        request,
        asked,
        reply.jobs,
        reply.frames,
        reply.response,
        name=reply.shape.name,
        skip_special_tokens=skip_special_tokens,
        parsing=parsing,
    )


async def count(request: Request) -> Response:
    """What the prompt would cost, media included, also where it is too long to be answered."""
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, InputBody, state.config.limits.max_request_bytes)
    check_model(state, body.model)
    check_input(body)
    body.truncation = None  # all of it is counted
    tools, _ = check_tools(state, body, calls_back=False)
    parent = earlier(state, exchange.key_name, body.previous_response_id)
    asked = resolve(SamplingFields(), None, 0, state.defaults, state.config, state.vocabulary)
    async with client_present(request):
        with exchange.hold(1, "texts"):
            _, job = await prompt_of(exchange, body, parent, tools, asked, state.renderer.counting())
    return json_response({"object": "response.input_tokens", "input_tokens": job.num_tokens})


class Reply:
    """A response that ends with its request: its prompt, its events or body, and what is stored of it."""

    def __init__(self, exchange: Exchange, body: ResponsesBody, prompt: MakePrompt, shape: ResponseObject) -> None:
        self.exchange = exchange
        self.body = body
        self.prompt = prompt
        self.shape = shape
        self.turn: Turn

    async def jobs(self) -> list[Job]:
        self.turn, job = await self.prompt()
        return [job]

    def frames(self, answer: Answer) -> ResponseEvents:
        return ResponseEvents(answer, self.shape, self.store)

    async def response(self, answer: Answer) -> Response:
        content, cuts = await answer.in_pool_if_large(partial(self.shape.whole, answer))
        self.store(content, cuts)
        return json_response(content)

    def store(self, content: dict[str, Any], cuts: bytes) -> None:
        """Keeps the ended response, unless the client wants it forgotten; `cuts`: where its deltas begin and end."""
        if self.body.store is False:
            return
        output = content["output"]
        self.turn.outputs = orjson.dumps(output)
        ids = tuple(item["id"] for item in output)
        key, body = self.exchange.key_name, orjson.dumps(content)
        self.exchange.state.responses.add(Stored(key, content["id"], self.turn, body, ids, cuts))


async def in_background(
    request: Request,
    body: ResponsesBody,
    asked: Asked,
    prompt: MakePrompt,
    make_shape: Callable[[], ResponseObject],
    parsing: Parsing | None,
) -> Response | None:
    """Hands the answer over to a task of its own; the client gets the queued response, or follows its events."""
    exchange = exchange_of(request)
    async with client_present(request):
        with ExitStack() as held:
            held.enter_context(exchange.hold(asked.n))
            turn, job = await prompt()
            (job,) = await with_grammar(exchange, asked, [job], parsing)
            shape = make_shape()
            entry = await begin(detached(request), body, asked, job, shape, turn, held, parsing)
        if not body.stream:
            return json_response(shape.at("queued"))
        await WatchedResponse(exchange, entry.record, 0).run()
    return None


async def begin(
    exchange: Exchange,
    body: ResponsesBody,
    asked: Asked,
    job: Job,
    shape: ResponseObject,
    turn: Turn,
    held: ExitStack,
    parsing: Parsing | None,
) -> Stored:
    """Submits the job and stores the running response, which from now on has what is `held`."""
    state = exchange.state
    answer = Answer(exchange, asked, [job], body.skip_special_tokens is not False, parsing)
    held.callback(answer.close)
    await answer.submit(shape.name, exchange.request_id)
    if state.responses.running >= state.responses.most:  # checked without an await before the response is added
        raise queue_full(state.places.retry_after(), "as many responses run in the background as this server stores")
    entry = Stored(exchange.key_name, shape.name, turn)
    entry.running = Background(answer, shape, entry, held.pop_all())
    state.responses.add(entry)
    return entry


# -- what is asked


def check(state: AppState, body: ResponsesBody) -> Asked:
    """Everything that can be refused before the template runs."""
    check_input(body)
    check_background(state, body)
    refuse_experts(body.return_routed_experts)
    check_objects(body)
    if body.max_output_tokens is not None:
        in_range("max_output_tokens", body.max_output_tokens, 1, 2**31 - 1)
    for at, value in enumerate(body.include or ()):
        if value not in INCLUDE:
            known = ", ".join(INCLUDE)
            raise invalid(f"include[{at}]", f"include[{at}]: got {shown(value)}; must be one of {known}")
    wanted = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wanted:
        raise invalid("top_logprobs", f"top_logprobs: needs {LOGPROBS} in include")
    if body.top_logprobs is not None and state.config.limits.max_logprobs != -1:
        in_range("top_logprobs", body.top_logprobs, 0, state.config.limits.max_logprobs)
    watched = body.stream or body.background  # whoever asks for the latter may follow it as it grows
    fields = SamplingFields(**{name: getattr(body, name) for name in SAMPLED}, stream=watched)
    logprobs = (body.top_logprobs or 0) if wanted else None
    asked = resolve(fields, logprobs, body.max_output_tokens, state.defaults, state.config, state.vocabulary)
    structure = format_structure(body.text.format if body.text else None, "text.format", state.config.limits)
    if structure is not None and asked.structure is not None:
        raise invalid("structured_outputs", "structured_outputs: not together with text.format; send one of them")
    return replace(asked, structure=structure or asked.structure)


def check_background(state: AppState, body: ResponsesBody) -> None:
    if not body.background:
        return
    if body.store is False or not state.responses.most:
        text = "background: needs store: true" if body.store is False else "background: this server stores nothing"
        raise invalid("background", text)


def check_input(body: InputBody) -> None:
    """What both routes take."""
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise not_here(name, f"{name}: this server does not have objects of OpenAI's servers; send the items")
    text = body.text
    one_of("text.verbosity", text.verbosity if text else None, ("low", "medium", "high"))
    reasoning = body.reasoning
    one_of("reasoning.effort", reasoning.effort if reasoning else None, EFFORTS)
    one_of("reasoning.summary", reasoning.summary if reasoning else None, ("auto", "concise", "detailed"))
    one_of("truncation", body.truncation, ("auto", "disabled"))


def check_objects(body: ResponsesBody) -> None:
    """metadata, and names."""
    pairs = body.metadata or {}
    if len(pairs) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in pairs.items()):
        raise invalid("metadata", "metadata: at most 16 pairs, keys of 64 and values of 512 characters")
    for name in ("user", "prompt_cache_key"):
        if len(getattr(body, name) or "") > 512:
            raise invalid(name, f"{name}: at most 512 characters")


# -- the prompt


def earlier(state: AppState, key: str, name: str | None) -> Turn | None:
    """The turn that this one continues."""
    if name is None:
        return None
    entry = state.responses.get(key, name)
    if entry is None:
        raise not_found(f"previous_response_id: {missing(name)}", "previous_response_id")
    if entry.running is not None:
        raise invalid("previous_response_id", "previous_response_id: that response still runs; wait for its end")
    return entry.turn


async def prompt_of(
    exchange: Exchange,
    body: InputBody,
    parent: Turn | None,
    tools: ToolTable,
    asked: Asked,
    renderer: Renderer,
    priority: int = 0,
    salt: str = "",
    keeps: bool = False,
) -> tuple[Turn, Job]:
    """Items to a prompt with its media, and the turn that they begin; complaints name the client's own fields."""
    state = exchange.state
    named = state.responses.items(exchange.key_name, references(as_items(body.input)))

    def read() -> tuple[Conversation, Turn]:
        before = parent.items() if parent else []
        conversation = read_items(body.instructions, before, body.input, named)
        conversation.root = "input"
        inputs = orjson.dumps(resolved(body.input, named)) if keeps else b"[]"
        return conversation, Turn(inputs, parent)

    async with preparing(exchange):
        conversation, turn = await asyncio.get_running_loop().run_in_executor(state.pool, read)
        await conversation.settle(state.renderer)
        cuts = conversation.cuts() if body.truncation == "auto" else iter((conversation,))
        too_long: Exception | None = None
        for shorter in cuts:
            try:
                return turn, await render(exchange, shorter, body, tools, asked, renderer, priority, salt)
            except (RenderError, ApiError) as error:
                if error.reason != "context_length_exceeded":
                    raise
                too_long = error
        assert too_long is not None
        raise too_long


async def render(
    exchange: Exchange,
    conversation: Conversation,
    body: InputBody,
    tools: ToolTable,
    asked: Asked,
    renderer: Renderer,
    priority: int,
    salt: str,
) -> Job:
    effort = body.reasoning.effort if body.reasoning else None
    said = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort is not None else {}
    kwargs = {**said, **(body.chat_template_kwargs or {})}
    messages = conversation.messages()
    with conversation.told():
        async with media_preload(exchange, salt) as ahead:
            await ahead.begin(renderer.embedded(messages))
            prompt = await renderer.chat(messages, tools=tools.offered, template_kwargs=kwargs)
            return await prepare(exchange, prompt, asked, salt=salt, priority=priority, param="input", ahead=ahead)


def echoed_format(asked: dict[str, Any] | None) -> dict[str, Any]:
    """`text.format` as the official client's types demand it: flat and with a name, also where chat's form came."""
    if not asked:
        return {"type": "text"}
    inner = asked.get("json_schema") if asked.get("type") == "json_schema" else None
    flat = {"type": "json_schema", **inner} if isinstance(inner, dict) else asked
    if flat.get("type") != "json_schema" or isinstance(flat.get("name"), str):
        return flat
    return {**flat, "name": "response"}


def shape_of(
    exchange: Exchange, body: ResponsesBody, model: str, asked: Asked, echoed: list[dict[str, Any]]
) -> ResponseObject:
    """The response object with all that is echoed."""
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {key: choice[key] for key in ("type", "name", "mode", "tools", "server_label") if key in choice}
    text, reasoning = body.text, body.reasoning
    verbosity = {"verbosity": text.verbosity} if text and text.verbosity else {}
    name = f"resp_{exchange.request_id}"
    state = exchange.state
    if state.responses.get(exchange.key_name, name):  # a label of the client's, used before
        name = f"resp_{uuid4().hex}"
    echo = {
        "created_at": int(time.time()),
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "service_tier": None,
        "store": body.store is not False,
        "temperature": asked.params.temperature,
        "text": {"format": echoed_format(text.format if text else None), **verbosity},
        "tool_choice": choice or "auto",
        "tools": echoed,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": asked.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    names = TokenNames(state.tokenizer, state.config.chat.return_tokens_as_token_ids)
    shape = ResponseObject(name, echo, names, body.top_logprobs or 0, known_tools(echoed))
    shape.seals = "reasoning.encrypted_content" in (body.include or ())
    return shape


ROUTES = [generating_route("/v1/responses", create), generating_route("/v1/responses/input_tokens", count)]
