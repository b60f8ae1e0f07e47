"""/openapi.json, made from this server's own types, and /docs/api, a page that displays it; off with --disable-docs.

In: the table of all operations, from server/dialects/table.py, which is above this folder. The page's files
are in server/playground, under the same content policy. Page and files need no key; the description does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.http.exchange import state_of
from server.routes import playground
from server.routes.endpoint import Handler, route
from server.state import AppState

if TYPE_CHECKING:
    from server.openapi import Operation

T = TypeVar("T")


def describing(table: Callable[[], Mapping[tuple[str, str], Operation]]) -> Handler:
    """The handler of /openapi.json; `table` is called at the first request."""

    @cache
    def document(root_path: str) -> bytes:
        from server.openapi import openapi

        return orjson.dumps(openapi(root_path, table()))

    async def description(request: Request) -> Response:
        state = state_of(request)
        data = await in_pool(state, document, state.config.server.root_path)
        return Response(data, media_type="application/json")

    return description


async def reading(request: Request) -> Response:
    """The page of the API, which fetches the description itself, with a key if one is needed."""
    made = await playground.read(request)
    return playground.html(request, made.api, made.digest)


async def leading(request: Request) -> Response:
    """Redirect to the list of pages."""
    return Response(status_code=307, headers={"location": "docs/"})


async def in_pool(state: AppState, make: Callable[..., T], *given: Any) -> T:
    """The result of `make` in the pool: at the first request it takes about 40 ms."""
    return await asyncio.get_running_loop().run_in_executor(state.pool, make, *given)


ROUTES = [
    route("/docs", leading, "GET"),
    route("/docs/api", reading, "GET"),
    route("/docs/api/{digest}/{name:path}", playground.file, "GET"),
]
