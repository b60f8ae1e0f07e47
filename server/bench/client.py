"""Client: requests over persistent HTTP/1.1 connections, timed where their bytes are read.

Owner: one event loop. In: the bytes of a body. Out: a Reply, whose times are taken once per read of the socket. This is
no library's client, because such a client takes several times the server's work per token and would be measured itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from server.bench.reply import MAX_ERROR, EventReader, Reply

clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Target:
    """The server's address and key."""

    host: str
    port: int
    secure: bool
    prefix: str  # first part of all paths, before /v1
    api_key: str

    @classmethod
    def of(cls, url: str, api_key: str) -> Target:
        """Parse a URL. Raises ValueError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url}: must be an http or https URL such as http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        secure = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if secure else 80), secure, prefix, api_key)

    def head(self, method: str, path: str, size: int = -1, request_id: str = "") -> bytes:
        """The lines before a body; `size` below 0: no body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"Content-Length: {size}", "Content-Type: application/json"] if size >= 0 else []
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        lines += [f"X-Request-Id: {request_id}"] if request_id else []
        return "\r\n".join([*lines, "\r\n"]).encode()


class Connection(asyncio.Protocol):
    """One socket, one exchange at a time. `ended` is set once the answer is complete or the socket is closed."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.open = False
        self.reader: EventReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.open = True

    def begin(self, request: bytes, reader: EventReader) -> asyncio.Future[None]:
        """Send a request; the future is done when the answer has ended."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)
        self.reader, self.status, self.streams = reader, 0, False
        self.body: list[bytes] = []
        self.transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        self.now = clock()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"the answer is not HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.streams = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        assert self.reader is not None
        if self.status == 200 and self.streams:
            self.reader.feed(data, self.now)
        else:
            self.body.append(data)

    def on_message_complete(self) -> None:
        reader = self.reader
        assert reader is not None
        if self.status != 200:
            said = b"".join(self.body)[:MAX_ERROR].decode(errors="replace")
            reader.answer.error = f"HTTP {self.status}: {said}"
        elif not self.streams:
            reader.whole(b"".join(self.body))
        if not self.parser.should_keep_alive():
            self.close()
        self.finish()

    def finish(self) -> None:
        if self.reader is not None:
            self.reader.close(self.now)
            self.reader = None
            if not self.ended.done():
                self.ended.set_result(None)

    def fail(self, error: str) -> None:
        if self.reader is not None:
            self.now = clock()
            self.reader.answer.error = self.reader.answer.error or error
            self.close()
            self.finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self.reader is not None and self.status == 200 and self.reader.done:
            self.finish()  # the server ends its answers by closing the connection
        self.fail(f"the connection was closed{f': {error}' if error else ''}")

    def close(self) -> None:
        self.open = False
        self.transport.close()


class Client:
    """Sends requests to one target; `record` is called with each Reply that has ended."""

    def __init__(self, target: Target, timeout: float, record: Callable[[Reply], None]) -> None:
        self.target = target
        self.timeout = timeout
        self.record = record
        self.idle: list[Connection] = []
        self.secured = ssl.create_default_context() if target.secure else None

    async def ask(self, path: str, body: bytes, answer: Reply, keeps_text: bool = False) -> Reply:
        """Send one request; `answer.error` holds its failure. A cancelled request is recorded as cut off."""
        label = f"bench-{answer.number}-{answer.turn}" if answer.number >= 0 else f"bench-warm-up{answer.number}"
        request = self.target.head("POST", path, len(body), label) + body
        answer.sent = clock()
        for _ in range(2):
            reused = bool(self.idle)
            reader = EventReader(answer, keeps_text)
            try:
                await self.exchange(request, reader)
            except asyncio.CancelledError:
                answer.cut, answer.end = True, clock()
                self.record(answer)
                raise
            if not (reused and answer.error.startswith("the connection was closed") and not answer.events):
                break
            answer.error = ""  # the server closed the idle connection: retry once over a new one
            self.idle.clear()
        self.record(answer)
        return answer

    async def exchange(self, request: bytes, reader: EventReader) -> None:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self.timeout):
                connection = self.idle.pop() if self.idle else await self.connect()
                await connection.begin(request, reader)
            if connection.open:
                self.idle.append(connection)
        except asyncio.CancelledError:
            leave(connection)
            raise
        except TimeoutError:
            reader.answer.error = f"no whole answer within --request-timeout {self.timeout:g} s"
            leave(connection)
            reader.close(clock())
        except OSError as error:
            reader.answer.error = f"no connection: {error}"
            reader.close(clock())

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.target.host, self.target.port, ssl=self.secured)
        return connection

    def close(self) -> None:
        for connection in self.idle:
            connection.close()


def leave(connection: Connection | None) -> None:
    """Close a connection before its answer has ended."""
    if connection is not None:
        connection.reader = None
        connection.close()
