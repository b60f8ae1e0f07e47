"""The table of our own routes: every path of the server's own protocols, with its methods and handler.

Owner: loop; made once, at start. In: the flags. Out: a line for each path. server/dialects/table.py adds the paths of
other servers' protocols and the description of the API; the only path of WebSockets is in server/app.py.
"""

from __future__ import annotations

from starlette.routing import Route

from server.flags.config import Config
from server.routes import (
    admin,
    audio,
    chat,
    completion,
    dev,
    embeddings,
    faults,
    health,
    messages,
    models,
    pages,
    playground,
    render,
    rerank,
    responses,
    stored_responses,
    tokenize,
    tokens,
)

FAMILIES = (
    chat, completion, audio, messages, responses, stored_responses, models, health, tokenize, render, tokens, admin,
    embeddings, rerank,
)  # fmt: skip


def own_routes(config: Config) -> list[Route]:
    """The lines that the flags enable."""
    server = config.server
    switched = [health.WITHOUT_PAGE if server.disable_playground else playground.ROUTES]
    switched += [
        *([] if server.disable_docs else [pages.ROUTES]),
        *([dev.ROUTES] if server.enable_dev_endpoints else []),
        *([faults.ROUTES] if config.health.debug_faults else []),
    ]
    return [line for lines in (*(family.ROUTES for family in FAMILIES), *switched) for line in lines]
