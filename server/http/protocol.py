"""Connection: uvicorn's httptools protocol with the limits it lacks: header bytes and count, header time, connections.

Owner: loop, one per connection. Uvicorn parses and writes; this class counts while headers arrive, because nothing
above sees them before they are complete (SECURITY S1, S11). Refusals at this level use the same error body as routes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError
from server.flags.config import LimitsConfig
from server.http.line import line_of
from server.http.offers import Parser, head_without_offer
from server.http.turnstile import Turnstile

log = logging.getLogger("omniloop.edge")


# ASGI extensions
ABORT = "omniloop.abort"  # drops the connection and what it has not taken yet
CHUNK = "omniloop.chunk"  # writes a piece of a streamed answer at once, if it can
LINE = "omniloop.line"  # tells where pieces of an answer that has begun may be written past the transport
LEAVING = "omniloop.leaving"  # takes what is to be called when the client leaves, and whether that still holds
LINGER_S = 2.0  # how long an answered client may go on sending before it is cut off


class HeaderLimit(Exception):
    """Raised in a parser callback; the parser stops and the refusal is sent."""


class Connection(HttpToolsProtocol):
    """One client connection."""

    limits: LimitsConfig  # these two are set once by `with_limits`
    turnstile: Turnstile

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = Parser(self, self.head_again)
        self.passed_over = b""  # the head of a message that offers another protocol, without its offer
        self.refusal: ApiError | None = None
        self.header_bytes = 0  # names and values of complete headers
        self.head_received = 0  # bytes since the message began; the parser keeps an unfinished header to itself
        self.header_timer: asyncio.TimerHandle | None = None
        self.in_head = False
        self.in_body = False
        self.held: list[bytes] = []  # the beginning of a message, until the turnstile lets it in
        self.lost = False
        self.leaving: set[Callable[[], None]] = set()  # called when the client leaves
        self.unanswered: deque[RequestResponseCycle] = deque()  # `cycle` is the newest of them

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            text = f"more than {self.limits.max_connections} connections are open"
            self.refuse(ApiError(503, "too_many_connections", text, headers={"retry-after": "5"}))
            return
        self.arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.disarm()
        super().connection_lost(exc)
        self.lost = True
        while self.unanswered:  # uvicorn tells the newest only, behind which others may be at work
            cycle = self.unanswered.popleft()
            cycle.disconnected = True
            cycle.message_event.set()
        for call in list(self.leaving):
            call()

    def on_leaving(self, call: Callable[[], None], wanted: bool) -> None:
        """See LEAVING. Of one who has left already it hears in the loop's next turn."""
        if not wanted:
            self.leaving.discard(call)
            return
        self.leaving.add(call)
        if self.lost:
            self.loop.call_soon(call)
        else:
            self.flow.resume_reading()  # where much has come at once nothing is read, its leaving included

    def arm(self) -> None:
        """Headers must be complete within the header timeout."""
        self.disarm()
        self.header_timer = self.loop.call_later(self.limits.header_timeout, self.header_timeout)

    def disarm(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def header_timeout(self) -> None:
        self.header_timer = None
        if not self.transport.is_closing():
            self.refuse(ApiError(408, "upload_timeout", "the headers arrived too slowly"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort, LEAVING: self.on_leaving}  # type: ignore[dict-item]
        self.header_bytes = 0
        self.head_received = 0
        self.in_head = True
        if self.header_timer is None:
            self.arm()

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > self.limits.max_target_bytes:
            self.too_large(f"path and query are longer than {self.limits.max_target_bytes} bytes")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.header_bytes += len(name) + len(value) + 4
        if self.header_bytes > self.limits.max_header_bytes:
            self.too_large(f"the headers are longer than {self.limits.max_header_bytes} bytes")
        if len(self.headers) >= self.limits.max_headers:
            self.too_large(f"there are more than {self.limits.max_headers} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.disarm()
        self.in_head = False
        takes = self.parser.should_upgrade() and self._should_upgrade()
        method = self.parser.get_method()
        if self.parser.should_upgrade() and not takes and method != b"CONNECT":
            self.passed_over = head_without_offer(method, self.url, self.parser.get_http_version(), self.headers)
            return
        self.in_body = True
        super().on_headers_complete()  # the app begins in a later turn of the loop
        if takes:
            self.in_body = False
            if self.unanswered:  # a socket's frames would follow an answer that is still to come
                self.refusal = ApiError(400, "invalid_request", "a WebSocket begins on a connection of its own")
                raise HeaderLimit
            return
        self.unanswered.append(self.cycle)
        self.scope["extensions"][CHUNK] = chunk_writer(self.cycle)  # type: ignore[assignment]
        self.scope["extensions"][LINE] = partial(line_of, self.cycle)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        if self.passed_over:
            return
        self.in_body = False
        super().on_message_complete()

    def head_again(self) -> bytes | None:
        """See offers.py."""
        head, self.passed_over = self.passed_over, b""
        return head or None

    def on_response_complete(self) -> None:
        """An answer that came before the end of the body: what still arrives is dropped, for a short while."""
        super().on_response_complete()
        if self.unanswered:
            self.unanswered.popleft()
        if self.in_body and not self.transport.is_closing():
            self.loop.call_later(LINGER_S, self.end_linger, self.cycle)

    def end_linger(self, cycle: object) -> None:
        if self.in_body and self.cycle is cycle:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Idle for too long; a peer that has not even read its last answer is cut off a little later."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.limits.stream_stall_timeout, self.transport.abort)

    def too_large(self, text: str) -> None:
        self.refusal = ApiError(431, "headers_too_large", text)
        raise HeaderLimit

    def data_received(self, data: bytes) -> None:
        if self.held:
            self.held.append(data)
        elif self.in_head or self.in_body or self.turnstile.enter(self.let_in):
            self.parse(data)
        else:
            self.held.append(data)
            self.flow.pause_reading()
            self._unset_keepalive_if_required()

    def let_in(self) -> None:
        """The turnstile has room for the message that began to arrive."""
        data, self.held = b"".join(self.held), []
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.parse(data)

    def parse(self, data: bytes) -> None:
        if self.refusal is not None:  # already answered; the rest of what was sent is not read
            return
        super().data_received(data)
        if self.in_head and self.refusal is None:
            self.head_received += len(data)
            most = self.limits.max_header_bytes + self.limits.max_target_bytes
            if self.head_received > most:
                self.refuse(ApiError(431, "headers_too_large", f"the headers are longer than {most} bytes"))

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser stops: our refusal, or plain bad HTTP."""
        self.refuse(self.refusal or ApiError(400, "invalid_request", "this is not a valid HTTP request"))

    def refuse(self, error: ApiError) -> None:
        """Answers and closes, below the app."""
        self.refusal = error
        self.disarm()
        body = error.body()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        head += b"x-request-id: %s\r\n" % uuid.uuid4().hex.encode()
        for name, value in error.headers.items():
            head += f"{name}: {value}\r\n".encode()
        # Nothing can be said beside an answer: it ends as if its client had left.
        alone = self.in_body and len(self.unanswered) == 1 and not self.cycle.response_started
        if alone or not self.unanswered:
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        if not self.unanswered and self.transport.can_write_eof():
            self.transport.write_eof()  # closing with unread bytes would reset, and the answer could be lost
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()


def chunk_writer(cycle: RequestResponseCycle) -> Callable[[bytes], bool]:
    """Writes a piece of an answer that has begun; False: it has to go through ASGI's `send`, which can wait.

    A third of what `send` costs, which matters once per token.
    """
    flow, write = cycle.flow, cycle.transport.write

    def write_chunk(piece: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    return write_chunk


def with_limits(limits: LimitsConfig) -> type[Connection]:
    """The protocol class for uvicorn, bound to this server's limits; its connections share a turnstile."""
    return type("BoundConnection", (Connection,), {"limits": limits, "turnstile": Turnstile()})
