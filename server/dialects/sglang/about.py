"""/get_model_info, /health_generate and /abort_request: facts, a probe that computes a token, and ends of answers.

Owner: loop. /flush_cache is an operators' route: server/routes/dev.py.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from engine.base.errors import EngineError
from server.dialects.sglang.schema import SglangAbortBody
from server.errors import from_engine, invalid
from server.http.body import read_json
from server.http.exchange import exchange_of, state_of
from server.http.watch import client_present
from server.ops.probe import probed
from server.routes import health, models
from server.routes.endpoint import route


async def health_generate(request: Request) -> Response:
    """200 once the engine has computed a token; callers at the same time share one probe. A paused engine is ready."""
    state = state_of(request)
    answer = await health.ready(request)
    if not state.engine.is_paused:
        async with client_present(request):
            try:
                await probed(state.engine)
            except EngineError as error:
                raise from_engine(error) from None
    return answer


async def abort(request: Request) -> Response:
    """End the answers with an id, or all answers of the caller's key; unknown ids are ignored."""
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, SglangAbortBody, state.config.limits.max_text_request_bytes, any_type=True)
    if not body.rid and not body.abort_all:
        raise invalid("rid", "rid: is missing; send the id of an answer, or abort_all: true")
    for (key, name), answers in list(state.live.items()):
        if key == exchange.key_name and (body.abort_all or name == body.rid):
            for answer in list(answers):
                answer.abort()
    return Response(b"")


ROUTES = [
    route("/get_model_info", models.info, "GET"),
    route("/health_generate", health_generate, "GET"),
    route("/abort_request", abort, "POST"),
]
