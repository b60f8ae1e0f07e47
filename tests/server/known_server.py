"""A server with just enough of the OpenAI API for a bench client; it notes when it wrote each token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

FIRST_S, GAP_S = 0.02, 0.01


@dataclass(slots=True)
class Known:
    """`bodies` are in order of arrival; `written` maps X-Request-Id to the times of the request and of each token."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    written: dict[str, list[float]] = field(default_factory=dict)
    open: int = 0
    most_open: int = 0
    fails: set[int] = field(default_factory=set)  # numbers of requests that are refused
    drafts: int = 0
    key: str = ""  # key that requests must have
    ended: int = 0  # number of finished answers
    one_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = json.loads(await reader.readexactly(int(fields.get("Content-Length", 0))) or "{}")
                path = head.split()[1]
                if self.key and fields.get("Authorization") != f"Bearer {self.key}":
                    self.answer(writer, 401, {"error": "a key"})
                elif path.endswith("/models"):
                    self.answer(writer, 200, {"data": [{"id": "known"}]})
                elif path == "/metrics":
                    self.drafts += 8
                    text = f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {self.drafts}\n'
                    text += f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.drafts / 2}\n'
                    self.answer(writer, 200, text)
                else:
                    await self.complete(writer, body, fields["X-Request-Id"])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} Said\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def complete(self, writer: asyncio.StreamWriter, body: dict[str, Any], label: str) -> None:
        """Writes a role, then max_tokens words in an event each, then a usage that counts three tokens per word."""
        self.bodies.append(body)
        self.written[label] = [time.perf_counter()]
        if len(self.bodies) in self.fails:
            self.answer(writer, 418, {"error": "no tea"})
            return
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(body["max_tokens"]):
            await asyncio.sleep(GAP_S if number else FIRST_S)
            chunk(writer, {"choices": [{"delta": {"content": f" {number}"}}]})
            self.written[label].append(time.perf_counter())
        chunk(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": 3 * body["max_tokens"]}
        chunk(writer, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 2}}})
        chunk(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        self.open -= 1
        self.ended += 1
        self.one_ended.set()


def chunk(writer: asyncio.StreamWriter, event: Any) -> None:
    data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@asynccontextmanager
async def known_server() -> AsyncIterator[Known]:
    """A server on a free port of this machine."""
    known = Known()
    server = await asyncio.start_server(known.serve, "127.0.0.1", 0)
    known.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield known
    finally:
        server.close()
