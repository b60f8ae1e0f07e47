"""/invocations: the body of one of our routes, chosen by its fields, with that route's answer, stream or error.

Owner: loop, the handler's task. In: a body of any of these routes. Out: the answer of the route. The body is read once
and passed to the route's handler again as bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from server.dialects.decisions import scores
from server.dialects.sagemaker.schema import ABSENT, InvocationBody
from server.dialects.tei import routes as tei
from server.errors import invalid, not_here
from server.http.body import POOL_BYTES, check_scan, check_type, decode_values, read_bytes
from server.http.exchange import TEI_PATHS, exchange_of
from server.http.incoming import Incoming
from server.routes import chat, completion, embeddings, responses
from server.routes.endpoint import Endpoint, Handler, route
from server.state import AppState

REPLACED = (b"content-type", b"content-length")  # headers of the body, which the route gets as one piece of JSON
CHOOSING = "messages, prompt, input, inputs, or query with documents, texts or items"
LINES: list[Route] = [
    line for family in (chat, completion, responses, embeddings, scores, tei) for line in family.ROUTES
]
HANDLERS: Mapping[str, Handler] = {line.path: line.app.handler for line in LINES if isinstance(line.app, Endpoint)}


async def invoke(request: Request) -> Response | None:
    """Answer as the chosen route does."""
    exchange = exchange_of(request)
    check_type(request, any_type=True)
    incoming = Incoming(request, exchange.state.config.limits.max_request_bytes)
    try:
        data = await read_bytes(incoming)
    finally:
        incoming.close()  # the route counts the bytes again
    path = chosen(exchange.state, await keys_of(exchange.state, data))
    exchange.details["invoked"] = path
    if path in TEI_PATHS:
        exchange.protocol = "tei"
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await request.receive()
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    headers = [(name, value) for name, value in request.scope["headers"] if name not in REPLACED]
    scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
    return await HANDLERS[path](Request(scope, again))


async def keys_of(state: AppState, data: bytes) -> InvocationBody:
    """The choosing fields of a body; a large one is scanned in the pool."""
    limits = state.config.limits

    def read() -> InvocationBody:
        check_scan(data, limits, limits.json_max_nodes, "the body holds more than {max_nodes} values")
        return decode_values(data, InvocationBody)

    if len(data) <= POOL_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(state.pool, read)


def chosen(state: AppState, keys: InvocationBody) -> str:
    """The path of the route that takes this body."""
    pools = state.engine.limits.pools
    config = state.engine.model.pooling
    classifies = config is not None and config.task == "classify"
    if keys.query != ABSENT:
        return "/score" if keys.items != ABSENT else "/rerank"
    given = [name for name in ("messages", "prompt", "input", "inputs") if getattr(keys, name) != ABSENT]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise invalid(None, f"the body must have exactly one of {CHOOSING}; it has {got}")
    if given == ["inputs"]:
        if not pools:
            raise not_here("inputs", f"inputs: is for models that pool, but this model generates; send {CHOOSING}")
        return "/predict" if classifies else "/embed_sparse" if config is not None and config.layers_first else "/embed"
    if given == ["prompt"]:
        return "/v1/completions"
    if pools:
        return "/classify" if classifies else "/v1/embeddings"
    return "/v1/chat/completions" if given == ["messages"] else "/v1/responses"


ROUTES = [route("/invocations", invoke, "POST")]
