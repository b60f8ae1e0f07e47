"""The steps shared by every endpoint of the engine: place, jobs, Answer, then a stream or a body.

Owner: loop, the handler's task. In: the endpoint's checked fields, and its functions: `jobs` makes the engine's
requests, `frames` writes chunks, `body` makes the response of a finished answer. Out: the response, or None if it was
streamed. An endpoint whose answers are not text passes its own `body` and no `frames`.

    client present -> places held -> jobs(), grammar -> Answer.submit -> PushedStream(frames(answer))
                                                                       | wait -> body(answer)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.answers import beam
from server.answers.answer import Answer
from server.answers.pushed_stream import Frames, PushedStream
from server.http.exchange import exchange_of
from server.http.watch import client_present
from server.jobs.job import Job, with_grammar
from server.jobs.sampling import Asked
from server.output.parser import Parsing

Jobs = Callable[[], Awaitable[list[Job]]]
MakeFrames = Callable[[Answer], Frames]
MakeBody = Callable[[Answer], Awaitable[Response]]


async def answer_with(
    request: Request,
    asked: Asked,
    jobs: Jobs,
    frames: MakeFrames | None,
    body: MakeBody,
    *,
    name: str,
    num_prompts: int = 1,
    skip_special_tokens: bool = True,
    parsing: Parsing | None = None,
) -> Response | None:
    """One answer, streamed or as a body. `name`: the client's id of the answer; `frames` None: an endpoint without
    streams; `parsing`: how its text is parsed.

    The places of all choices are held from the preparation of the prompts until the answer has ended; they count for
    the request's key. When the client disconnects, everything ends.
    """
    exchange = exchange_of(request)
    async with client_present(request):
        with exchange.hold(asked.n * num_prompts):
            prepared = await jobs()
            if asked.structure is not None or asked.thinking_budget is not None:
                prepared = await with_grammar(exchange, asked, prepared, parsing)
            with closing(Answer(exchange, asked, prepared, skip_special_tokens, parsing)) as answer:
                await answer.submit(name, exchange.request_id)
                if frames is not None and asked.stream:
                    await PushedStream(answer, frames(answer)).run()
                    return None
                if asked.beam:
                    await beam.search(answer)
                await answer.wait()
                return await body(answer)


async def json_body(answer: Answer, build: Callable[[], dict[str, Any]]) -> Response:
    """A finished answer as JSON, made by `build`; a large body is built in the pool."""
    data = await answer.in_pool_if_large(lambda: orjson.dumps(build()))
    return Response(data, media_type="application/json")
