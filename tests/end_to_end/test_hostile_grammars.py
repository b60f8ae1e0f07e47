"""Schemas of clients that leave at once: they neither delay another client's grammar nor make it "too complex"."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from tests.end_to_end.hostile import ask, dial

CHAT = "/v1/chat/completions"
OBJECT = {"type": "object"}


def body(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": schema}}
    messages = [{"role": "user", "content": "hello"}]
    return {"messages": messages, "max_tokens": 2, "response_format": form, **fields}


def large(number: int) -> dict[str, Any]:
    """A schema that takes a quarter of a second to compile."""
    inner = {f"q{at}": {"type": "string", "maxLength": 20 + at} for at in range(8)}
    return {"type": "object", "properties": {f"p{number}_{at}": {**OBJECT, "properties": inner} for at in range(120)}}


def test_s30_grammars_of_clients_that_left_delay_no_others(embedded_process):
    port = embedded_process.port
    small = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert ask(port, "POST", CHAT, body(small))[0] == 200, "the compiler is warm"
    for number in range(60):
        data = json.dumps(body(large(number))).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with contextlib.closing(dial(port)) as link:
            link.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(0.02)  # long enough for the server to read the request
    begun = time.monotonic()
    status, content = ask(port, "POST", CHAT, body({**small, "title": "another"}))
    spent = time.monotonic() - begun
    print(f"{spent:.2f} s")
    assert status == 200, content
    assert spent < 4
