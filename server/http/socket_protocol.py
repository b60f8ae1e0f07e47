"""Socket: uvicorn's protocol of a WebSocket, for clients that send or read as they like.

Owner: loop. Imported with the first socket, or by `import_sockets`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

PIECE = 4096  # bytes that are parsed at a time


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
        if self.initial_response is not None and self.close_sent:  # refused with an answer, which is no fault to log
            self.handshake_complete = True

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
