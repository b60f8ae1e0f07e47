"""Connection: uvicorn's httptools protocol with the limits it lacks: heads, requests per turn, timers, connections.

Owner: loop, one per connection. Uvicorn parses and writes. This class counts while a head arrives, because the layers
above get only complete heads (SECURITY S1). It passes one message at a time to the parser, so that pipelined requests
go through the turnstile like requests of many connections. Every state has a timer (S11):

    silent or in a head   header timeout, until the request exists
    bytes wait to parse   a turn of the loop, the turnstile, or an answer that has to end first
    body                  its own deadlines (http/incoming)
    full or closing       Reader (http/flow)
    idle                  keep-alive timeout

Refusals at this level use the same error body as routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError
from server.flags.config import LimitsConfig
from server.http.arrived import Arrived
from server.http.flow import Flow, Reader
from server.http.head import Head, HeadLimit
from server.http.line import chunk_writer, line_of, until_close
from server.http.offers import Parser, head_without_offer
from server.http.patience import MOMENT_S, moment
from server.http.seats import MOST_REFUSED, Seat, Seats
from server.http.turnstile import Turnstile

log = logging.getLogger("omniloop.edge")


# ASGI extensions
ABORT = "omniloop.abort"  # closes the connection and drops its unsent bytes
CHUNK = "omniloop.chunk"  # writes a piece of a streamed answer at once, if it can
LINE = "omniloop.line"  # returns the socket to which a begun answer may be written past the transport
LEAVING = "omniloop.leaving"  # adds or removes a callback for the client's disconnect
LINGER_S = 2.0  # how long a client may send after its answer before it is cut off
MOST_WAITING = 16  # requests of a connection that wait or run; later ones are not parsed
MOST_UNPARSED = 64 << 10  # bytes; with more, the connection is not read
TURN_S = 0.001  # seconds of parsing in one turn of the loop


class Connection(HttpToolsProtocol):
    """One client connection."""

    limits: LimitsConfig  # `with_limits` sets these three once
    turnstile: Turnstile
    seats: Seats
    flow: Flow

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = Parser(self, self.head_again)  # type: ignore[assignment]
        self.passed_over = b""  # the head of a message without its offer of another protocol
        self.refusal: ApiError | None = None
        self.head = Head(self.limits)
        self.header_timer: asyncio.TimerHandle | None = None
        self.in_body = False
        self.body_left = 0  # bytes of a body whose length is known
        self.arrived = Arrived()
        self.waits = False  # whether received bytes are parsed in a later turn of the loop
        self.reader: Reader
        self.seat: Seat | None = None
        self.leaving: set[Callable[[], None]] = set()  # called when the client leaves
        self.unanswered: deque[RequestResponseCycle] = deque()  # `cycle` is the newest of them

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.reader = Reader(transport, self.limits.stream_stall_timeout)
        try:
            self.seat = self.seats.take(self.client)
        except ApiError as full:
            self.turn_away(full)
            return
        self.arm()

    def turn_away(self, full: ApiError) -> None:
        """No seat is free: up to MOST_REFUSED connections at a time get the error, all others are aborted."""
        self.seats.refused += 1
        if self.seats.refused <= MOST_REFUSED:
            self.refuse(full)
        else:
            self.refusal = full
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.disarm()
        self.reader.stop()
        super().connection_lost(exc)
        self.arrived.clear()
        if self.seat is None:
            self.seats.refused -= 1
        else:
            self.seat.leave()
        while self.unanswered:  # uvicorn notifies the newest request only; earlier ones may still run
            cycle = self.unanswered.popleft()
            cycle.disconnected = True
            cycle.message_event.set()
        for call in list(self.leaving):
            call()

    @property
    def lost(self) -> bool:
        """Whether the connection has ended."""
        return self.parser is None

    def on_leaving(self, call: Callable[[], None], wanted: bool) -> None:
        """Register a LEAVING callback. If the client has already disconnected, it is called in the loop's next turn."""
        if not wanted:
            self.leaving.discard(call)
            return
        self.leaving.add(call)
        if self.lost:
            self.loop.call_soon(call)
        else:
            self.flow.resume_reading()  # reading must go on to notice the disconnect

    # -- timers

    def arm(self) -> None:
        """Start the timer within which the headers must be complete."""
        self.disarm()
        self.header_timer = self.loop.call_later(self.limits.header_timeout, self.header_timeout)

    def disarm(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def header_timeout(self) -> None:
        late, self.header_timer = self.header_timer, None
        if self.transport.is_closing():
            return
        if self.waits:  # waits for a turn of the loop: the head may have come in time
            self.header_timer = self.loop.call_later(MOMENT_S, self.header_timeout)
            return
        self.header_timer = moment(late, self.header_timeout)
        if self.header_timer is not None:
            return
        if self.head.silent:  # a client that has sent nothing expects no answer
            self.shut()
        else:
            self.refuse(ApiError(408, "upload_timeout", "the headers arrived too slowly"))

    def shut(self) -> None:
        """Close once the client has read the written bytes; the Reader limits the time for this."""
        self.transport.close()
        if not self.lost:
            self.reader.watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.reader.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.reader.stop()

    def _unset_keepalive_if_required(self) -> None:
        super()._unset_keepalive_if_required()
        if self.seat is not None:
            self.seat.wake()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        self.timeout_keep_alive_task = moment(self.timeout_keep_alive_task, self.timeout_keep_alive_handler)
        if self.timeout_keep_alive_task is not None:
            return
        super().timeout_keep_alive_handler()
        self.shut()

    # -- parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort, LEAVING: self.on_leaving}  # type: ignore[dict-item]
        self.head.begin()
        self.body_left = 0
        if self.header_timer is None:
            self.arm()

    def on_url(self, url: bytes) -> None:
        self.head.count_target(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer; trailers are otherwise ignored (RFC 9110, 6.5.1)."""
        if self.head.count(name, value):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.head.end()
        takes = self.parser.should_upgrade() and self._should_upgrade()
        method = self.parser.get_method()
        if self.parser.should_upgrade() and not takes and method != b"CONNECT":
            self.passed_over = head_without_offer(method, self.url, self.parser.get_http_version(), self.headers)
            return
        super().on_headers_complete()  # the app begins in a later turn of the loop
        if takes:
            if self.unanswered:  # the socket's frames would follow an unfinished answer
                self.refusal = ApiError(400, "invalid_request", "a WebSocket begins on a connection of its own")
                raise HeadLimit
            return
        self.disarm()
        self.in_body = True
        self.body_left = self.head.body_length
        self.unanswered.append(self.cycle)
        if self.cycle.keep_alive:
            self.cycle.default_headers = [*self.cycle.default_headers, self.seats.keep_alive]
        self.scope["extensions"][CHUNK] = chunk_writer(self.cycle)  # type: ignore[assignment]
        self.scope["extensions"][LINE] = partial(line_of, self.cycle)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self.body_left = max(0, self.body_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.passed_over:
            return
        self.in_body = False
        super().on_message_complete()

    def head_again(self) -> bytes | None:
        """The head without its offer of another protocol; see offers.py."""
        head, self.passed_over = self.passed_over, b""
        return head or None

    def handle_websocket_upgrade(self) -> None:
        """Pass the connection and its seat to the WebSocket protocol."""
        self.disarm()
        self.arrived.clear()
        seat, self.seat = self.seat, None
        made: Any = self.ws_protocol_class
        self.ws_protocol_class = partial(made, seat=seat)  # type: ignore[assignment]
        super().handle_websocket_upgrade()

    # -- from read to request, from answer to the next

    def data_received(self, data: bytes) -> None:
        if self.refusal is not None:  # already answered; the rest of the input is ignored
            return
        self.head.silent = False
        self._unset_keepalive_if_required()
        self.arrived.add(data)
        if not self.waits:
            self.parse()
        self.hold()

    def enter(self) -> None:
        """Continue in this turn of the loop if the turnstile has room, otherwise in a later turn."""
        if self.turnstile.enter(self.go_on):
            self.go_on()

    def go_on(self) -> None:
        """Parse the bytes that have waited."""
        self.waits = False
        if not self.lost and not self.transport.is_closing():
            self.parse(entered=True)
            self.hold()

    def hold(self) -> None:
        """Read on while few bytes wait, so that a disconnect is noticed."""
        if not self.lost and not self.transport.is_closing():
            self.flow.hold(len(self.arrived) > MOST_UNPARSED)

    def parse(self, entered: bool = False) -> None:
        """Feed the parser until it has to wait for a later turn or for an answer. `entered`: the turnstile has admitted
        the next message."""
        ends = time.perf_counter() + TURN_S
        while self.arrived and self.refusal is None and not self.transport.is_closing():
            if not (self.head.open or self.in_body):
                if len(self.unanswered) >= MOST_WAITING:  # on_response_complete continues
                    return
                if not entered and not self.turnstile.enter(self.go_on):
                    self.waits = True
                    return
                entered = False
            elif time.perf_counter() > ends:
                self.waits = True
                self.loop.call_soon(self.enter)
                return
            self.feed(self.arrived.take(self.body_left))

    def feed(self, piece: bytes) -> None:
        between = not (self.head.open or self.in_body)
        super().data_received(piece)
        if self.refusal is not None:
            return
        if self.head.is_too_long(len(piece), between):
            most = self.head.most
            self.refuse(ApiError(431, "headers_too_large", f"the headers are longer than {most} bytes"))
        elif self.header_timer is None and not self.unanswered:  # an empty line before a request begins no head
            self.arm()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        """Start a first request at once; pipelined requests go through the turnstile."""
        start = partial(self.start, cycle, app)
        if not self.unanswered or self.turnstile.enter(start):
            start()

    def start(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        if self.lost:
            return
        if cycle.scope["http_version"] == "1.0":
            app = until_close(cycle, app)
        task = self.loop.create_task(cycle.run_asgi(app))  # type: ignore[arg-type]
        task.add_done_callback(self.task_ended)
        self.tasks.add(task)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not self.lost and self.transport.is_closing():
            self.reader.watch()

    def on_response_complete(self) -> None:
        """An answer has ended. If it came before the end of its body, the rest of the body is dropped for a
        short while.
        """
        super().on_response_complete()
        if self.unanswered:
            self.unanswered.popleft()
        if self.transport.is_closing():
            return
        if self.seat is not None and not self.unanswered:
            self.seat.rest(self.shut)
        if self.in_body and not self.unanswered:
            self.loop.call_later(LINGER_S, self.end_linger, self.cycle)
        if self.arrived and not self.waits:
            self.waits = True
            self._unset_keepalive_if_required()
            self.loop.call_soon(self.again)

    def again(self) -> None:
        """Continue parsing: an answer has made room for the next request."""
        self.waits = False
        if not self.lost and not self.transport.is_closing():
            self.parse()
            self.hold()

    def end_linger(self, cycle: object) -> None:
        if self.in_body and self.cycle is cycle and not self.lost:
            self.shut()

    # -- refusals

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser stops, for our refusal or for invalid HTTP."""
        self.refuse(self.refusal or self.head.refusal or ApiError(400, "invalid_request", NOT_HTTP))

    def refuse(self, error: ApiError) -> None:
        """Send an error below the app, and close."""
        self.refusal = error
        self.disarm()
        self.arrived.clear()
        body = error.body()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        head += b"x-request-id: %s\r\n" % uuid.uuid4().hex.encode()
        for name, value in error.headers.items():
            head += f"{name}: {value}\r\n".encode()
        # No error is written into an unfinished answer: its connection closes as after a disconnect.
        alone = self.in_body and len(self.unanswered) == 1 and not self.cycle.response_started
        if alone or not self.unanswered:
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        if not self.unanswered and self.transport.can_write_eof():
            self.transport.write_eof()  # closing with unread bytes would reset, and the answer could be lost
            self.loop.call_later(LINGER_S, self.shut)
        else:
            self.shut()


NOT_HTTP = "this is not a valid HTTP request"


def with_limits(limits: LimitsConfig, turnstile: Turnstile, seats: Seats) -> type[Connection]:
    """The protocol class for uvicorn with this server's limits; its connections share a turnstile and seats."""
    return type("BoundConnection", (Connection,), {"limits": limits, "turnstile": turnstile, "seats": seats})
