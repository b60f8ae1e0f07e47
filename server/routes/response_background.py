"""Responses in the background: the request ends, and the answer continues in its own task.

Owner: loop. In: a prompt and the shape of its response. Out: the queued response, or its events while the client
follows. The task then holds everything that was held for the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from server.answers.answer import Answer
from server.answers.background import Background, detached
from server.answers.response_items import ResponseObject
from server.answers.watch_response import WatchedResponse
from server.errors import queue_full
from server.http.exchange import Exchange, exchange_of
from server.http.watch import client_present
from server.jobs.job import Job, with_grammar
from server.jobs.sampling import Asked
from server.output.parser import Parsing
from server.output.response_store import Stored, Turn
from server.routes.endpoint import json_response
from server.schema.responses import ResponsesBody

MakePrompt = Callable[[], Awaitable[tuple[Turn, Job]]]


async def in_background(
    request: Request,
    body: ResponsesBody,
    asked: Asked,
    prompt: MakePrompt,
    make_shape: Callable[[], ResponseObject],
    parsing: Parsing | None,
) -> Response | None:
    """Pass the answer to its own task; the client gets the queued response, or follows its events."""
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
    """Submit the job and store the running response, which then owns `held`."""
    state = exchange.state
    answer = Answer(exchange, asked, [job], body.skip_special_tokens is not False, parsing)
    held.callback(answer.close)
    await answer.submit(shape.name, exchange.request_id)
    if state.responses.running >= state.responses.most:  # no await between this check and adding the response
        raise queue_full(state.places.retry_after(), "as many responses run in the background as this server stores")
    entry = Stored(exchange.key_name, shape.name, turn)
    entry.running = Background(answer, shape, entry, held.pop_all())
    state.responses.add(entry)
    return entry
