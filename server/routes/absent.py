"""Routes of the contract that this server knows and cannot serve (yet): 501 with a clear text, never 404.

Owner: loop. When a family arrives, its line here is deleted.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.errors import not_here
from server.routes.endpoint import Handler, route

POOLING = "the served model generates text; it makes no embeddings, classes or scores"

ABSENT = {
    "/v1/embeddings": POOLING,
    "/pooling": POOLING,
    "/classify": POOLING,
    "/score": POOLING,
    "/v1/score": POOLING,
    "/rerank": POOLING,
    "/v1/rerank": POOLING,
    "/v2/rerank": POOLING,
}


def refusal(text: str) -> Handler:
    async def refuse(request: Request) -> Response:
        raise not_here(None, text)

    return refuse


ROUTES = [route(path, refusal(text), "POST") for path, text in ABSENT.items()]
