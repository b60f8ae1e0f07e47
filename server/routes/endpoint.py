"""Endpoint: from Starlette's router to a handler; and helpers for handlers' answers.

Owner: loop. A handler is `async def name(request) -> Response | None`; None means that it has streamed its answer. Here
the route's template becomes the label of log and metrics, so no client text becomes a label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.base.errors import AdapterBusyError, AdapterError
from server.errors import (
    ApiError,
    adapter_refused,
    deadline,
    invalid,
    not_found,
    not_here,
    queue_full,
    quoted,
    size_within,
)
from server.http.exchange import Exchange, exchange_of, state_of
from server.output.logprobs import TokenNames
from server.render.prompt import Side
from server.schema.common import SamplingFields
from server.state import AppState

NAMED = 10  # adapters that an error names
Handler = Callable[[Request], Awaitable[Response | None]]
GENERATES = "the served model generates text; it makes no embeddings, classes or scores"
POOLS = "the served model makes embeddings, classes or scores; it generates no text"


class Endpoint:
    """An ASGI app around one handler."""

    def __init__(self, path: str, handler: Handler) -> None:
        self.path = path
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        exchange_of(request).route = self.path
        response = await self.handler(request)
        if response is not None:
            await response(scope, receive, send)


def route(path: str, handler: Handler, *methods: str) -> Route:
    """One line of the route table."""
    return Route(path, Endpoint(path.replace(":path", ""), handler), methods=list(methods))


def generating_route(path: str, handler: Handler) -> Route:
    """A POST route of models that generate; 501 if the served model computes vectors or scores."""
    return route(path, _for_runner(handler, False, POOLS), "POST")


def pooling_route(path: str, handler: Handler) -> Route:
    """A POST route of models that compute vectors or scores; 501 if the served model generates."""
    return route(path, _for_runner(handler, True, GENERATES), "POST")


def _for_runner(handler: Handler, pools: bool, otherwise: str) -> Handler:
    async def checked(request: Request) -> Response | None:
        if state_of(request).engine.limits.pools is not pools:
            raise not_here(None, otherwise)
        return await handler(request)

    return checked


def json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def served_model(exchange: Exchange, name: str | None) -> str:
    """The model's name to report, as `check_model`; an adapter of that name serves the exchange."""
    if not name or name in exchange.state.names:
        return name or exchange.state.names[0]
    return await _adapted(exchange, name)


async def _adapted(exchange: Exchange, name: str) -> str:
    """The same for a name that may be an adapter's."""
    state = exchange.state
    if state.adapters is None:
        return check_model(state, name)
    try:
        async with asyncio.timeout(state.config.limits.queue_timeout):
            adapter = await state.adapters.use(adapter_of(state, name))
    except TimeoutError:
        raise deadline("the adapter was not loaded within --queue-timeout") from None
    except AdapterBusyError as error:
        raise queue_full(state.places.retry_after(), str(error)) from None
    except AdapterError as error:
        raise adapter_refused(error, "model", f"adapter {quoted(name)}: ") from None
    if adapter is None:
        return check_model(state, name)
    exchange.adapter = adapter
    exchange.details["adapter"] = adapter.name
    return name


def adapter_of(state: AppState, name: str) -> str:
    """The adapter's part of a model's name: `NAME`, or `BASE:NAME`."""
    base, colon, inner = name.partition(":")
    return inner if colon and base in state.names else name


def check_model(state: AppState, name: str | None) -> str:
    """The model's name to report: the requested one, or the first if none was sent. 404 for an unknown name."""
    if not name or name in state.names:
        return name or state.names[0]
    if state.adapters is not None and state.adapters.get(adapter_of(state, name)) is not None:
        return name
    return other_name(state, name)


def other_name(state: AppState, name: str) -> str:
    """A name that is not served: accepted where the operator accepts any, or if it is `tgi`, which clients of TGI
    always send.
    """
    most = state.config.limits.max_name_bytes
    if size_within(name, most) > most:
        raise ApiError(400, "invalid_parameter", f"model: is longer than {most} bytes", "model")
    if name == "tgi" or state.config.server.any_model_name:
        return name
    known = [*state.names, *(each.name for each in state.adapters.names[:NAMED])] if state.adapters else state.names
    raise not_found(f"model {quoted(name)} does not exist; this server has {', '.join(known)}", "model")


def names_of(state: AppState, body: SamplingFields) -> TokenNames:
    """How this request's log-probabilities write tokens."""
    as_ids = body.return_tokens_as_token_ids
    return TokenNames(state.tokenizer, state.config.chat.return_tokens_as_token_ids if as_ids is None else as_ids)


def response_id(prefix: str, given: str | None, exchange: Exchange) -> str:
    """The id of the answer: the body's request_id if given, otherwise the exchange's."""
    if given is None:
        return prefix + exchange.request_id
    if not (1 <= len(given) <= 128 and given.isascii() and given.isprintable()):
        raise invalid("request_id", "request_id: must be 1 to 128 printable ASCII characters")
    return prefix + given


def gateway_priority(request: Request) -> str:
    """X-Vllm-Priority, under the priority policy."""
    policy = state_of(request).config.scheduler.scheduling_policy
    return request.headers.get("x-vllm-priority", "") if policy == "priority" else ""


def refuse_experts(asked: bool | None) -> None:
    """Refuse `return_routed_experts` on routes whose answers have no field for it."""
    if asked:
        text = "return_routed_experts: answers of this route have no place for experts; leave the field out, or ask "
        raise invalid("return_routed_experts", text + "/v1/chat/completions, /v1/completions or /inference/v1/generate")


def one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise invalid(name, f"{name}: got {quoted(value)}; must be one of {', '.join(allowed)}")


def side_of(side: str | None) -> Side:
    if side is None or side == "left":
        return "left"
    if side == "right":
        return "right"
    raise invalid("truncation_side", f"truncation_side: got {quoted(side)}; must be left or right")
