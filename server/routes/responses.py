"""/v1/responses (API.md section 11): create, and count a prompt's tokens; stored_responses.py has the other routes.

Owner: loop; items are read in the pool. In: ResponsesBody. Out: one JSON body, events pushed as the engine makes
tokens, or at once a queued response that continues in the background. A stored response belongs to its request's key.
Tools that only OpenAI's servers run are left out and named to the client, because coding clients always send them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import Answer
from server.answers.respond import answer_with
from server.answers.response_events import ResponseEvents
from server.answers.response_items import ResponseObject
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import client_present
from server.jobs.job import Job
from server.jobs.sampling import priority_of, resolve, salt_of
from server.output.response_store import Stored, Turn
from server.render.items import tool_places
from server.routes.endpoint import (
    check_model,
    gateway_priority,
    generating_route,
    json_response,
    served_model,
)
from server.routes.response_background import MakePrompt, in_background
from server.routes.response_fields import check, check_input
from server.routes.response_prompt import earlier, prompt_of
from server.routes.response_shape import shape_of
from server.routes.response_tools import check_tools, note_unenforced, parsing_for
from server.schema.common import SamplingFields
from server.schema.responses import InputBody, ResponsesBody


async def create(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, ResponsesBody, state.config.limits.max_request_bytes)
    model = await served_model(exchange, body.model)
    asked = check(state, body)
    tools, echoed = check_tools(exchange, body)
    note_unenforced(exchange, body, tools.calls)
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
    """The size of the prompt in tokens, including media, even if it is too long for the context."""
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, InputBody, state.config.limits.max_request_bytes)
    check_model(state, body.model)
    check_input(body)
    body.truncation = None  # all of the input is counted
    tools, _ = check_tools(exchange, body, calls_back=False)
    parent = earlier(state, exchange.key_name, body.previous_response_id)
    asked = resolve(SamplingFields(), None, 0, state.defaults, state.config, state.vocabulary)
    async with client_present(request):
        with exchange.hold(1, "texts"):
            _, job = await prompt_of(exchange, body, parent, tools, asked, state.renderer.counting())
    return json_response({"object": "response.input_tokens", "input_tokens": job.num_tokens})


class Reply:
    """A response that ends with its request: its prompt, its events or body, and its storage."""

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
        """Store the ended response unless the client sent store: false; `cuts`: the boundaries of its deltas."""
        if self.body.store is False:
            return
        output = content["output"]
        self.turn.outputs = orjson.dumps(output)
        ids = tuple(item["id"] for item in output)
        key, body = self.exchange.key_name, orjson.dumps(content)
        self.exchange.state.responses.add(Stored(key, content["id"], self.turn, body, ids, cuts))


ROUTES = [generating_route("/v1/responses", create), generating_route("/v1/responses/input_tokens", count)]
