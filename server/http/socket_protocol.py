"""Socket: uvicorn's WebSocket protocol, with bounds for clients that send too much or do not read.

Owner: loop. Imported with the first socket, or by `import_sockets`. One read may hold 40,000 frames. They are parsed in
small steps: up to the next message if none is queued, for a millisecond per turn of the loop, and in a turn that the
turnstile grants, so that many sockets together do not block the loop.

    read   ping ping ping .. ping, message
    turns  |parse 1 ms|  others  |parse 1 ms|  others  |message -> queue|

Frames without content (pings, pongs, empty fragments) are bounded: with more than 200 in ten seconds, the socket is
closed with 1008. A client that does not read is cut off (Reader).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from server.http.flow import Reader
from server.http.seats import Seat
from server.http.turnstile import Turnstile

PIECE = 1024  # bytes parsed at a time: at most 170 frames
TURN_S = 0.001  # seconds of parsing per turn
MOST_UNPARSED = 64 << 10  # bytes; with more, the socket is not read
MOST_EMPTY, WINDOW_S = 200, 10.0  # frames without content
MOST_FRAGMENTS = 4096  # fragments of one message
PROTOCOL_ERROR, NOT_TEXT, POLICY = 1002, 1007, 1008  # close codes


class Socket(WebSocketsSansIOProtocol):
    """One client's socket."""

    def __init__(
        self, stall: float, turnstile: Turnstile | None = None, seat: Seat | None = None, **given: Any
    ) -> None:
        super().__init__(**given)
        self._stall = stall
        self._turnstile = turnstile or Turnstile()
        self._seat = seat
        self._unparsed = memoryview(b"")
        self._waits = False  # for a turn in which to parse
        self._held = False  # reading is paused because too many bytes are unparsed
        self._empty = 0  # frames without content since `_since`
        self._since = 0.0
        self._reader: Reader

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._reader = Reader(self.transport, self._stall)

    def data_received(self, data: bytes) -> None:
        self._unparsed = memoryview(bytes(self._unparsed) + data)
        if not self._waits:
            self._enter()
        self._hold()

    def _enter(self) -> None:
        """Parse in this turn of the loop if the turnstile has room, otherwise in a later turn."""
        if self._turnstile.enter(self._go_on):
            self._parse()
        else:
            self._waits = True

    def _go_on(self) -> None:
        self._waits = False
        self._parse()
        self._hold()

    def _parse(self) -> None:
        """Parse up to the next message, or until this socket's time is over."""
        ends = time.perf_counter() + TURN_S
        while self._unparsed and self.queue.empty():
            if self.transport.is_closing():
                self._unparsed = memoryview(b"")
                return
            if time.perf_counter() > ends:
                self._enter_later()
                return
            piece, self._unparsed = self._unparsed[:PIECE], self._unparsed[PIECE:]
            super().data_received(bytes(piece))
        self._watch()

    def _enter_later(self) -> None:
        """Parse in a later turn of the loop."""
        self._waits = True
        self.loop.call_soon(self._again)

    def _again(self) -> None:
        self._waits = False
        self._enter()

    def _hold(self) -> None:
        """Pause reading while too many bytes are unparsed."""
        held = len(self._unparsed) > MOST_UNPARSED
        if held == self._held or self.transport.is_closing():
            return
        self._held = held
        if self.read_paused:
            return
        if held:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if not self._waits and self.queue.empty():
            self._parse()
            self._hold()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if not self._held:
                self.transport.resume_reading()
        return message

    # -- frames without content

    def handle_ping(self) -> None:
        super().handle_ping()
        self._count_empty()

    def handle_pong(self, event: Frame) -> None:
        super().handle_pong(event)
        self._count_empty()

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        if len(self.frames) > MOST_FRAGMENTS:
            self._fail(f"a message may have {MOST_FRAGMENTS} fragments")
        elif not event.data:
            self._count_empty()

    def _count_empty(self) -> None:
        now = self.loop.time()
        if now - self._since > WINDOW_S:
            self._since, self._empty = now, 0
        self._empty += 1
        if self._empty > MOST_EMPTY:
            self._fail(f"more than {MOST_EMPTY} frames without content in {WINDOW_S:g} s")

    def send_receive_event_to_app(self) -> None:
        """Handle a complete message. uvicorn would log bytes that are not UTF-8 as a fault of the server."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self._fail("a text is not UTF-8", NOT_TEXT)
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Handle frames that break the protocol. Before the handshake is answered, no close frame can be sent."""
        if self.conn.close_sent is not None:
            super().handle_parser_exception()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": PROTOCOL_ERROR, "reason": ""})
        self.close_sent = True
        self.transport.close()

    def _fail(self, reason: str, code: int = POLICY) -> None:
        """Close the socket: the client breaks a rule."""
        if self.close_sent or self.transport.is_closing():
            return
        self.stop_keepalive()
        self.frames = []
        self.conn.fail(code, reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()
        self._watch()

    # -- the client's end

    async def send(self, message: Any) -> None:
        """Send a message; raises ClientDisconnected if the protocol has closed by itself (too large a message,
        no pong).
        """
        await self.writable.wait()
        if self.close_sent and self.initial_response is None:
            raise ClientDisconnected
        await super().send(message)
        if self.initial_response is not None and self.close_sent:  # refused with an answer, which is no error to log
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._reader.stop()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._watch()

    def _watch(self) -> None:
        """Watch whether the client reads the remaining bytes of a closing transport."""
        if self.transport.is_closing() and not self.disconnected:
            self._reader.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._reader.stop()
        self._unparsed = memoryview(b"")
        seat, self._seat = self._seat, None
        if seat is not None:
            seat.leave()
