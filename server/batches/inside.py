"""Requests from inside the process: the app answers a line of a batch as it answers a client.

Owner: loop. In: the ASGI app behind the checks of a connection, a path and a body. Out: the whole answer. The scope
names the key whose batch it is; no connection can set this name.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

LINE_OF = "omniloop.line_of"  # in the scope: the name of the API key


class Reply(NamedTuple):
    """An answer."""

    status: int
    request_id: str
    body: bytes
    retry_after: float = 1.0  # seconds
    is_json: bool = True


async def ask(app: ASGIApp, key: str, path: str, body: bytes) -> Reply:
    """The app's answer to a POST of JSON."""
    name = secrets.token_hex(16)
    sent, found = False, dict[str, Any]()
    pieces: list[bytes] = []

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # this client leaves only by cancellation
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found["status"] = message["status"]
            named = dict(message["headers"])
            found["wait"] = float(named.get(b"retry-after", b"1"))
            found["json"] = named.get(b"content-type", b"").startswith(b"application/json")
        else:
            pieces.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode())]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "extensions": {},
        LINE_OF: key,
    }
    await app(scope, receive, send)
    return Reply(found["status"], name, b"".join(pieces), found["wait"], found["json"])
