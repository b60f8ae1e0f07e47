"""WebSocket: a socket as an Exchange, so that host, origin, key and phase are checked as for any request.

Owner: loop. In: an ASGI scope of a WebSocket. Out: the exchange for its handler. Until the socket is accepted, a
refusal is an HTTP answer with its status and body; later errors are the handler's events. Browsers cannot send headers
with a socket, so they send the key as the subprotocol that OpenAI's clients use.

    connect -> Edge, Gate -> handler: accept -> receive, send ... -> close
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Scope, Send

from server.flags.config import LimitsConfig
from server.http.turnstile import Turnstile

METHOD = "WEBSOCKET"  # used as the request's method; unlike GET it is not safe, so origins are checked
MAX_MESSAGE = 4 << 20  # bytes
KEY_PROTOCOL = b"openai-insecure-api-key."
PROTOCOL = "realtime"


def sockets(limits: LimitsConfig, turnstile: Turnstile) -> Callable[..., asyncio.Protocol]:
    """A factory for the protocol of a connection that becomes a WebSocket."""

    def made(**given: Any) -> asyncio.Protocol:
        return import_sockets()(limits.stream_stall_timeout, turnstile, **given)

    return made


def import_sockets() -> type[Any]:
    """The protocol's class. Importing its library takes a twentieth of a second, so it is not imported at start."""
    from server.http.socket_protocol import Socket

    return Socket


def as_exchange_scope(scope: Scope) -> None:
    """Add the fields to a socket's scope that checks of requests read."""
    scope["method"] = METHOD
    offered = [name.encode("latin-1") for name in scope.get("subprotocols", ())]
    keys = [name[len(KEY_PROTOCOL) :] for name in offered if name.startswith(KEY_PROTOCOL)]
    if keys and not any(name == b"authorization" for name, _ in scope["headers"]):
        scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + keys[0])]


def refusing(send: Send) -> Send:
    """Rename HTTP answers of a refused socket to ASGI's WebSocket messages; other messages pass unchanged."""

    async def send_message(message: Message) -> None:
        if message["type"].startswith("http."):
            message = {**message, "type": "websocket." + message["type"]}
        await send(message)

    return send_message


def accepting(scope: Scope, headers: list[tuple[bytes, bytes]]) -> Message:
    """The message that opens a socket."""
    chosen = PROTOCOL if PROTOCOL in scope.get("subprotocols", ()) else None
    return {"type": "websocket.accept", "subprotocol": chosen, "headers": headers}
