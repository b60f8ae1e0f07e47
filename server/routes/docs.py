"""/openapi.json and /docs: what this server understands, made from its own types; off with --disable-docs."""

from __future__ import annotations

from functools import cache

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.routes.endpoint import route
from server.state import state_of


@cache
def document(root_path: str) -> bytes:
    from server.openapi import openapi

    return orjson.dumps(openapi(root_path))


@cache
def page() -> str:
    from server.openapi import openapi, page

    return page(openapi())


async def description(request: Request) -> Response:
    root_path = state_of(request).config.server.root_path
    return Response(document(root_path), media_type="application/json")


async def reading(request: Request) -> Response:
    headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return Response(page(), media_type="text/html; charset=utf-8", headers=headers)


ROUTES = [route("/openapi.json", description, "GET"), route("/docs", reading, "GET")]
