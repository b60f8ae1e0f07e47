"""WebSocket: one as an Exchange, so that host, origin, key and phase are checked as for any request.

Owner: loop. In: an ASGI scope of a WebSocket. Out: the exchange that its handler gets. Until the socket is accepted a
refusal is an HTTP answer with its status and body; behind that, errors are the handler's events. Browsers, which can
send no header with a socket, give the key as the subprotocol that OpenAI's clients use.

    connect -> Edge, Gate -> handler: accept -> receive, send ... -> close
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

from starlette.types import Message, Scope, Send

from server.config import LimitsConfig

METHOD = "WEBSOCKET"  # in the place of a request's method: never safe in the sense of GET, so origins are checked
MAX_MESSAGE = 4 << 20  # bytes
PIECE = 4096  # bytes that are parsed at a time
KEY_PROTOCOL = b"openai-insecure-api-key."
PROTOCOL = "realtime"


def sockets(limits: LimitsConfig) -> Callable[..., asyncio.Protocol]:
    """Makes what speaks on a connection that becomes a WebSocket."""

    def made(**given: Any) -> asyncio.Protocol:
        return import_sockets()(limits.stream_stall_timeout, **given)

    return made


@cache
def import_sockets() -> type[Any]:
    """The protocol's class. Its library takes a twentieth of a second to import, which no start should wait for."""
    from uvicorn.protocols.utils import ClientDisconnected
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    class Socket(WebSocketsSansIOProtocol):
        """Parses a little at a time, as one read may hold thousands of tiny messages, and cuts off a client that has
        stopped reading, as closing waits until what is written is read."""

        def __init__(self, stall: float, **given: Any) -> None:
            super().__init__(**given)
            self._stall = stall
            self._cut: asyncio.TimerHandle | None = None
            self._unparsed = memoryview(b"")

        def data_received(self, data: bytes) -> None:
            self._unparsed = memoryview(bytes(self._unparsed) + data)
            self._parse()

        def _parse(self) -> None:
            """Up to the next message; no more is read while messages wait."""
            while self._unparsed and self.queue.empty():
                piece, self._unparsed = self._unparsed[:PIECE], self._unparsed[PIECE:]
                super().data_received(bytes(piece))

        async def receive(self) -> Any:
            message = await self.queue.get()
            self._parse()
            if self.read_paused and self.queue.empty():
                self.read_paused = False
                self.transport.resume_reading()
            return message

        async def send(self, message: Any) -> None:
            """A socket that has closed by itself (too large a message, no pong) is as one that the client left."""
            await self.writable.wait()
            if self.close_sent and self.initial_response is None:
                raise ClientDisconnected
            await super().send(message)

        def keepalive_timeout(self) -> None:
            super().keepalive_timeout()
            self.loop.call_later(self._stall, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._cut = self.loop.call_later(self._stall, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end_cut()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._end_cut()

        def _end_cut(self) -> None:
            if self._cut is not None:
                self._cut.cancel()
                self._cut = None

    return Socket


def as_exchange_scope(scope: Scope) -> None:
    """Gives a socket's scope what checks of requests read."""
    scope["method"] = METHOD
    offered = [name.encode("latin-1") for name in scope.get("subprotocols", ())]
    keys = [name[len(KEY_PROTOCOL) :] for name in offered if name.startswith(KEY_PROTOCOL)]
    if keys and not any(name == b"authorization" for name, _ in scope["headers"]):
        scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + keys[0])]


def refusing(send: Send) -> Send:
    """Answers of a socket that is refused, in ASGI's words for them; what a socket says otherwise passes by."""

    async def told(message: Message) -> None:
        if message["type"].startswith("http."):
            message = {**message, "type": "websocket." + message["type"]}
        await send(message)

    return told


def accepting(scope: Scope, headers: list[tuple[bytes, bytes]]) -> Message:
    """The message that opens a socket."""
    chosen = PROTOCOL if PROTOCOL in scope.get("subprotocols", ()) else None
    return {"type": "websocket.accept", "subprotocol": chosen, "headers": headers}
