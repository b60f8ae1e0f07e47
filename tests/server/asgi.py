"""An in-memory client: calls the ASGI app as a server does; can disconnect early, read slowly, split bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.server.described_answers import check

LENGTH = {"max_tokens": 4, "ignore_eos": True}  # answers of a known length with any weights


@dataclass
class Call:
    """One request. `writes` has the body of each ASGI write."""

    app: Any
    method: str
    path: str
    body: bytes | list[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    reply_headers: dict[str, str] = field(default_factory=dict)
    writes: list[bytes] = field(default_factory=list)
    complete: bool = False
    aborted: bool = False

    def __post_init__(self) -> None:
        self.gone = asyncio.Event()  # set by leave()
        self.reading = asyncio.Event()  # cleared while the reader is away
        self.reading.set()
        self.wrote = asyncio.Event()
        self._over = asyncio.Event()
        self._leaving: set[Callable[[], None]] = set()
        self.pieces = [self.body] if isinstance(self.body, bytes) else list(self.body)
        self.task: asyncio.Task[None] | None = None

    def scope(self) -> dict[str, Any]:
        path, _, query = self.path.partition("?")
        named = {"host": "test", **self.headers}
        if self.body and "content-type" not in named:
            named["content-type"] = "application/json"
        return {
            "type": "http",
            "method": self.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "client": ("10.0.0.1", 1234),
            "server": ("test", 80),
            "headers": [(name.lower().encode(), value.encode("latin1")) for name, value in named.items()],
            "extensions": {"omniloop.abort": self._abort, "omniloop.leaving": self._on_leaving},
        }

    def _abort(self) -> None:
        self.aborted = True

    def _on_leaving(self, call: Callable[[], None], wanted: bool) -> None:
        (self._leaving.add if wanted else self._leaving.discard)(call)
        if wanted and self.gone.is_set():
            asyncio.get_running_loop().call_soon(call)

    async def receive(self) -> dict[str, Any]:
        if self.pieces:
            piece = self.pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}
        waiting = [asyncio.ensure_future(self.gone.wait()), asyncio.ensure_future(self._over.wait())]
        try:
            await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
        finally:
            for future in waiting:
                future.cancel()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        if self.gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.reply_headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        if message.get("body"):
            self.writes.append(message["body"])
        self.wrote.set()
        if not message.get("more_body", False):
            self.complete = True
            self._over.set()

    def start(self) -> Call:
        self.task = asyncio.get_running_loop().create_task(self.app(self.scope(), self.receive, self.send))
        return self

    async def finish(self, timeout: float = 20.0) -> Call:
        if self.task is None:
            self.start()
        assert self.task is not None
        async with asyncio.timeout(timeout):
            await self.task
        if self.complete:
            check(self.method, self.path, self.status, self.reply_headers.get("content-type", ""), self.content)
        return self

    def leave(self) -> None:
        """Closes the client's connection."""
        self.gone.set()
        for call in list(self._leaving):
            call()

    @property
    def content(self) -> bytes:
        return b"".join(self.writes)

    def json(self) -> Any:
        return orjson.loads(self.content)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]

    def events(self) -> list[Any]:
        """The JSON of each event; "[DONE]" remains a string."""
        found = []
        for block in self.content.decode().split("\n\n")[:-1]:
            assert block.startswith("data: "), block
            text = block.removeprefix("data: ")
            found.append(text if text == "[DONE]" else orjson.loads(text))
        return found


class Client:
    """Makes calls of one app."""

    def __init__(self, app: Any, headers: dict[str, str] | None = None) -> None:
        self.app = app
        self.headers = headers or {}

    def call(self, method: str, path: str, json: Any = None, body: Any = b"", headers: Any = None) -> Call:
        data = body if json is None else orjson.dumps(json)
        return Call(self.app, method, path, data, {**self.headers, **(headers or {})})

    async def get(self, path: str, **named: Any) -> Call:
        return await self.call("GET", path, **named).finish()

    async def post(self, path: str, json: Any = None, **named: Any) -> Call:
        return await self.call("POST", path, json, **named).finish()

    async def chat(self, text: str = "hello", **fields: Any) -> Call:
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return await self.post("/v1/chat/completions", {"messages": messages, **LENGTH, **fields})

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Call:
        return await self.post("/v1/completions", {"prompt": prompt, **LENGTH, **fields})
