"""Fuzz targets for framing: HTTP/1.1 requests and WebSocket frames, from bytes to the app.

As in targets.py, a target takes bytes and may raise only refusals. Connections have no socket: a Wire passes bytes to
the protocol and collects the protocol's bytes. The same bytes at once and in pieces must give the app the same requests
or messages; if a connection ends early, one list must be a prefix of the other.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from server.flags.limits_flags import LimitsConfig
from server.http.protocol import with_limits
from server.http.seats import Seats
from server.http.turnstile import Turnstile
from server.http.websocket import MAX_MESSAGE, import_sockets, sockets
from server.ops.proxies import TrustedProxies
from tests.end_to_end import hostile
from tests.end_to_end.conftest import MODEL
from tests.end_to_end.wire import request_bytes
from tests.fuzz.text_targets import pieces

LOG = logging.getLogger("uvicorn.error")
MOST_TURNS = 10_000  # most turns of the loop until a connection has handled its bytes
UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class Wire(asyncio.Transport):
    """The transport of one connection; `written` collects the server's bytes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self._protocol: Any = None
        self._closing = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def give(self, data: bytes) -> None:
        """Passes bytes of the client to the protocol."""
        if not self._closing:
            self._protocol.data_received(data)

    def leave(self) -> None:
        """Closes the connection, as a client that leaves."""
        if not self._closing:
            self.close()

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def write_eof(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self._protocol.connection_lost(None)

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Site:
    """A server without a listener: connections of one kind, and the requests or messages that its app gets."""

    def __init__(self) -> None:
        limits, turnstile = LimitsConfig(), Turnstile()
        self._config = uvicorn.Config(
            self._app,
            loop="none",
            http=with_limits(limits, turnstile, Seats(8, TrustedProxies(()))),
            ws=sockets(limits, turnstile),  # type: ignore[arg-type]
            ws_max_size=MAX_MESSAGE,
            ws_per_message_deflate=False,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            date_header=False,
        )
        self._config.load()
        self._state = ServerState()
        self.found: list[Any] = []

    def connect(self) -> Wire:
        wire = Wire()
        made: Any = self._config.http_protocol_class
        protocol = made(config=self._config, server_state=self._state, app_state={})
        wire.set_protocol(protocol)
        protocol.connection_made(wire)
        return wire

    async def settle(self) -> None:
        """Runs the loop until every task has ended or waits for the client."""
        for _ in range(MOST_TURNS):
            before = event_loop().calls
            await asyncio.sleep(0)
            if event_loop().calls == before + 1:  # only this task's call
                return
        raise AssertionError(f"still busy after {MOST_TURNS} turns of the loop")

    async def end(self, wire: Wire) -> None:
        """The client leaves; asserts that the app's tasks end."""
        assert wire.is_closing() or is_timed(wire.get_protocol()), wire.written
        wire.leave()
        await self.settle()
        assert not self._state.tasks, self._state.tasks
        assert not self._state.connections, self._state.connections

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.found.append((scope["method"], scope["raw_path"], scope["query_string"], [*scope["headers"]], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _socket(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.found.append(message.get("text", message.get("bytes")))


def is_timed(protocol: Any) -> bool:
    """True if a timer of the protocol or of the app ends the connection of a silent client."""
    if isinstance(protocol, import_sockets()):
        return bool(protocol.handshake_initiated)
    timers = (protocol.header_timer, protocol.timeout_keep_alive_task)
    return bool(protocol.unanswered) or any(timer is not None for timer in timers) or protocol.refusal is not None


@contextmanager
def faults() -> Iterator[list[str]]:
    """Collects errors that the loop and uvicorn report; warnings do not count, because bad client bytes cause them."""
    found: list[str] = []

    class Faults(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                found.append(self.format(record))

    handler, propagate = Faults(), LOG.propagate
    LOG.addHandler(handler)
    LOG.propagate = False
    loop = event_loop()
    loop.set_exception_handler(lambda _, context: found.append(repr(context)))
    try:
        yield found
    finally:
        loop.set_exception_handler(None)
        LOG.propagate = propagate
        LOG.removeHandler(handler)


class Loop(asyncio.SelectorEventLoop):
    """Counts call_soon; if only settle's own call is new after a turn, all other tasks wait."""

    calls = 0

    def call_soon(self, *args: Any, **given: Any) -> asyncio.Handle:
        self.calls += 1
        return super().call_soon(*args, **given)


@functools.cache
def event_loop() -> Loop:
    return Loop()


def exchange(parts: Iterable[bytes], opening: bytes = b"") -> tuple[list[Any], bytes]:
    """Returns what the app gets and what the client gets. `opening` is sent and answered before `parts`."""

    async def run() -> tuple[list[Any], bytes]:
        site = Site()
        wire = site.connect()
        if opening:
            wire.give(opening)
            await site.settle()
            assert wire.written.startswith(b"HTTP/1.1 101 "), wire.written
            wire.written = b""
        for part in parts:
            wire.give(part)
        await site.settle()
        await site.end(wire)
        return site.found, wire.written

    with faults() as found:
        result = event_loop().run_until_complete(run())
    assert not found, found
    return result


def read_requests(data: bytes) -> None:
    whole, answers = exchange([data])
    cut, _ = exchange(pieces(data))
    agree(whole, cut)
    assert not answers or answers.startswith(b"HTTP/1.1 "), answers[:80]
    assert b"HTTP/1.1 500 " not in answers, answers


def read_frames(data: bytes) -> None:
    whole, _ = exchange([data], UPGRADE)
    cut, _ = exchange(pieces(data), UPGRADE)
    agree(whole, cut)


def agree(one: list[Any], other: list[Any]) -> None:
    count = min(len(one), len(other))
    assert one[:count] == other[:count], (one, other)


def http_seeds() -> list[bytes]:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    whole = request_bytes("POST", "/v1/completions", body)
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    chunked += b'Transfer-Encoding: chunked\r\n\r\n10\r\n{"prompt":"abc"}\r\n0\r\nX-A: b\r\n\r\n'
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--x--\r\n'
    upload = request_bytes("POST", "/v1/audio/transcriptions", form, kind="multipart/form-data; boundary=x")
    return [whole, chunked, upload, request_bytes("GET", "/v1/models") * 3, whole + chunked]


def offers() -> list[bytes]:
    """Returns requests that offer another protocol."""
    other = request_bytes("POST", "/tokenize", {"prompt": "a"}, {"Connection": "Upgrade", "Upgrade": "h2c"})
    early = UPGRADE + hostile.frame(1, b"early")
    return [UPGRADE, early, other, b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"]


def socket_seeds() -> list[bytes]:
    update = hostile.frame(1, b'{"type":"session.update","model":"x"}')
    append = hostile.frame(1, b'{"type":"input_audio_buffer.append","audio":"AAAA"}')
    return [update + append, append[:20] + hostile.frame(9, b"ping") + update, hostile.frame(2, bytes(64)) * 3]


def fragments() -> list[bytes]:
    parts = hostile.frame(1, b"\xc3", last=False) + hostile.frame(9, b"a") + hostile.frame(0, b"\xa9")
    closed = hostile.frame(8, b"\x03\xe8bye") + hostile.frame(1, b"late")
    return [parts, closed, hostile.frame(10) * 3, hostile.frame(1, b"\xff")]
