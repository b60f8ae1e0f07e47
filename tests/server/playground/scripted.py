"""A server of the page whose answers the test writes: files and headers of the real server, but no model.

Each POST to the completions takes the next `Reply`; a reply with a gate pauses after its first chunk until the test
opens the gate. `bodies` has the requests. When a browser disconnects, the reply's `left` is set.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from server.routes.playground import HEADERS, TYPES, pages

ABOUT: dict[str, Any] = {
    "version": "0",
    "models": ["scripted"],
    "family": "none",
    "embedded": False,
    "task": "chat",
    "modalities": ["text", "image"],
    "max_model_len": 1000,
    "max_request_bytes": 1 << 20,
    "max_logprobs": 20,
    "structured_outputs": True,
    "tool_calls": True,
    "thinking_switch": False,
    "defaults": {},
}


@dataclass
class Reply:
    """One answer: chunks of a stream, or a refusal."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    error: dict[str, Any] | None = None
    gate: threading.Event | None = None
    left: threading.Event = field(default_factory=threading.Event)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def finish(reason: str, prompt: int = 0, completion: int = 0) -> list[dict[str, Any]]:
    """The last chunks: the finish reason, and the usage if there is any."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    return [ended, *([{"choices": [], "usage": usage}] if prompt else [])]


def said(text: str, reason: str = "stop", prompt: int = 0, completion: int = 0) -> Reply:
    return Reply([delta(content=text), *finish(reason, prompt, completion)])


def refused(status: int, message: str, reason: str = "") -> Reply:
    return Reply(status=status, error={"message": message, "reason": reason, "code": status})


class Scripted(ThreadingHTTPServer):
    """The server of one test at a time; the test changes its state between requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reset()

    def reset(self) -> None:
        self.about = dict(ABOUT)
        self.key = ""
        self.replies: deque[Reply] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.missing: tuple[str, ...] = ()  # files that are absent, as on a server of another version
        self.digest = pages().digest

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors: a browser may disconnect in the middle of an answer."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a failing test has its own message."""

    def give(self, status: int, data: bytes, kind: str, cached: bool = False) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.send_header("cache-control", "max-age=3600" if cached else "no-store")
        self.end_headers()
        self.wfile.write(data)

    def give_json(self, status: int, content: Any) -> None:
        self.give(status, json.dumps(content).encode(), "application/json")

    def is_keyed(self) -> bool:
        if not self.server.key or self.headers.get("authorization") == f"Bearer {self.server.key}":
            return True
        self.give_json(401, {"error": {"message": "a valid API key is needed", "reason": "unauthorized"}})
        return False

    def do_GET(self) -> None:
        made = pages()
        name = self.path.rpartition(f"/{made.digest}/")[2]
        if self.path == "/":
            self.give(200, made.html, "text/html; charset=utf-8")
        elif self.path == "/about":
            if self.is_keyed():
                self.give_json(200, {**self.server.about, "page": self.server.digest})
        elif self.path == "/metrics":
            self.give(200, b"", "text/plain")
        elif name in made.files and name not in self.server.missing:
            self.give(200, made.files[name], TYPES[Path(name).suffix], cached=True)
        else:
            self.give_json(404, {"error": {"message": "the page has no such file; load the page again"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.is_keyed():
            return
        self.server.bodies.append(body)
        reply = self.server.replies.popleft()
        if reply.error is not None:
            self.give_json(reply.status, {"error": reply.error})
        else:
            self.stream(reply)
            self.close_connection = True

    def stream(self, reply: Reply) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            for number, chunk in enumerate(reply.chunks):
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                if number == 0 and reply.gate is not None:
                    while not reply.gate.wait(0.02):
                        self.wfile.write(b": waits\n\n")  # fails once the browser has disconnected
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            reply.left.set()


@contextmanager
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
