"""/abort_requests: ends answers by the ids their clients know (whole id, same key; SECURITY S7)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.http.body import read_json
from server.http.exchange import exchange_of
from server.routes.endpoint import route
from server.schema.tokenize import AbortBody


async def abort(request: Request) -> Response:
    """Abort the answers with these ids; unknown ids are ignored."""
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, AbortBody, state.config.limits.max_text_request_bytes)
    for name in body.request_ids:
        for answer in list(state.live.get((exchange.key_name, name), ())):
            answer.abort()
    return Response(b"")


ROUTES = [route("/abort_requests", abort, "POST")]
