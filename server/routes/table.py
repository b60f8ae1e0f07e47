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
    batches,
    chat,
    completion,
    embeddings,
    files,
    health,
    messages,
    models,
    render,
    rerank,
    responses,
    stored_responses,
    switched,
    tokenize,
    tokens,
)

FAMILIES = (
    chat, completion, audio, messages, responses, stored_responses, models, health, tokenize, render, tokens, admin,
    embeddings, rerank, files, batches,
)  # fmt: skip


def own_routes(config: Config) -> list[Route]:
    """The lines that the flags enable."""
    return [line for lines in (*(family.ROUTES for family in FAMILIES), switched.routes(config)) for line in lines]
