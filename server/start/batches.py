"""Starts the batches of a ready server; server/batches runs them.

Owner: loop. In: the state of a server that can answer. Out: the batches of its folder continue.
"""

from __future__ import annotations

from functools import partial

import msgspec

from server.batches.batches import Server
from server.batches.inside import Reply, ask
from server.errors import ApiError
from server.ops.limits import ADMIN
from server.routes.endpoint import check_model
from server.state import AppState

RESPONSES = "/v1/responses"


def begin_batches(state: AppState) -> None:
    """Begin to answer lines."""
    state.batches.start(server_of(state))


def server_of(state: AppState) -> Server:
    """The server as batches use it."""
    app = state.batches.app

    async def answer(key: str, url: str, body: bytes) -> Reply:
        return await ask(app, key, url, unstored(body) if url == RESPONSES else body)

    return Server(
        ask=answer,
        unknown_model=partial(unknown_model, state),
        knows=lambda key: key == ADMIN or state.keys.knows(key),
        window=state.engine.limits.max_idle,
        max_line_bytes=state.config.limits.max_request_bytes,
    )


def unstored(body: bytes) -> bytes:
    """The body with store: false, unless it sets the field: a batch would displace the responses of its key."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({"store": False} | fields)


def unknown_model(state: AppState, name: str | None) -> str:
    """Why a model is not served; "": it is, or it may be the name of an adapter that its first request loads."""
    if state.adapters is not None:
        return ""
    try:
        check_model(state, name)
    except ApiError as error:
        return error.message
    return ""
