"""/openapi.json and /docs: what this server understands, made from its own types; off with --disable-docs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.http.exchange import state_of
from server.routes.endpoint import route
from server.state import AppState

T = TypeVar("T")


@cache
def document(root_path: str) -> bytes:
    from server.openapi import openapi

    return orjson.dumps(openapi(root_path))


@cache
def page() -> str:
    from server.openapi import openapi, page

    return page(openapi())


async def description(request: Request) -> Response:
    state = state_of(request)
    data = await in_pool(state, document, state.config.server.root_path)
    return Response(data, media_type="application/json")


async def reading(request: Request) -> Response:
    headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
    html = await in_pool(state_of(request), page)
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


async def in_pool(state: AppState, make: Callable[..., T], *given: Any) -> T:
    """Made at the first request, which takes some 40 ms."""
    return await asyncio.get_running_loop().run_in_executor(state.pool, make, *given)


ROUTES = [route("/openapi.json", description, "GET"), route("/docs", reading, "GET")]
