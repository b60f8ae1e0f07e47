"""HTTP/1.1 over a raw socket: a test controls the content of each packet and the moment at which the client leaves.

`ask` sends one request and reads one whole answer; `Stream` reads server-sent events one by one with their times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

JSON = "application/json"


@dataclass
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


def request_bytes(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, kind: str = JSON
) -> bytes:
    """The bytes of a request; `body` is bytes, sent unchanged, or any JSON value."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "localhost", "Content-Length": str(len(data)), **({"Content-Type": kind} if data else {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **(headers or {})}.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin1") + data


class Connection:
    """One client connection to 127.0.0.1:port (or to a Unix socket)."""

    def __init__(self, port: int | str) -> None:
        self.port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Connection:
        if isinstance(self.port, str):
            self.reader, self.writer = await asyncio.open_unix_connection(self.port, limit=1 << 24)
        else:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Closes the connection with RST instead of FIN."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (lower case)."""
        line = await self.reader.readline()
        if not line:
            raise ConnectionResetError("the server closed the connection before it answered")
        status = int(line.split()[1])
        headers = {}
        while (line := await self.reader.readline()).strip():
            name, _, value = line.decode("latin1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return status, headers

    async def reply(self, method: str = "GET") -> Reply:
        status, headers = await self.head()
        if method == "HEAD":
            content = b""
        elif "content-length" in headers:
            content = await self.reader.readexactly(int(headers["content-length"]))
        else:
            content = b"".join([piece async for piece in self.chunks()])
        return Reply(status, headers, content)

    async def chunks(self) -> Any:
        """The pieces of a chunked body, as the server wrote them."""
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readline()


async def ask(port: int | str, method: str, path: str, body: Any = None, **named: Any) -> Reply:
    """One request on a connection of its own."""
    async with Connection(port) as connection:
        # The answer may come before the end of the body.
        connection.writer.write(request_bytes(method, path, body, **named))
        return await connection.reply(method)


@dataclass
class Stream:
    """The content of a streamed answer, with the time of each event."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)  # "[DONE]" stays a string
    times: list[float] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The token ids of choice 0."""
        return self.tokens_of(0)

    def tokens_of(self, index: int) -> list[int]:
        found: list[int] = []
        for event in self.events:
            for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
                if choice["index"] == index:
                    found += choice.get("token_ids") or []
        return found

    @property
    def text(self) -> str:
        parts = []
        for event in self.events:
            for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
        return "".join(parts)

    @property
    def done(self) -> bool:
        return bool(self.events) and self.events[-1] == "[DONE]"

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if isinstance(event, dict) and "error" in event), None)

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:])]


async def read_events(connection: Connection, stream: Stream, until: int | None = None) -> Stream:
    """Reads the head, if not read before; then reads events to the end, or until there are `until` events."""
    if not stream.status:
        stream.status, stream.headers = await connection.head()
    if stream.status != 200:
        return stream
    while line := await connection.reader.readline():
        if not line.startswith(b"data: "):
            continue
        stream.times.append(time.perf_counter())
        text = line[6:].strip()
        stream.events.append("[DONE]" if text == b"[DONE]" else json.loads(text))
        if stream.done or (until is not None and len(stream.events) >= until):
            break
    return stream


async def stream(port: int | str, path: str, body: dict[str, Any]) -> Stream:
    """Reads one streamed answer to its end."""
    async with Connection(port) as connection:
        await connection.send(request_bytes("POST", path, {**body, "stream": True}))
        return await read_events(connection, Stream())


def greedy(prompt: Any = "the cat and the hat", max_tokens: int = 32, **fields: Any) -> dict[str, Any]:
    """A completion whose tokens are predictable: greedy, with a fixed length."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
