"""Decodes every answer that a test gets with the type that /openapi.json names for its route.

These types forbid unknown fields, so an undescribed field fails the test that received it.
`Call.finish` of tests/server/asgi.py calls `check`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from server.dialects.table import operations
from server.openapi import STREAM, Operation, error_of
from server.schema.answers_common import Error, TeiError
from server.schema.answers_server import Root

SHARED = ("/rerank", "/invocations")  # the body decides which protocol their errors have


@cache
def patterns() -> list[tuple[str, re.Pattern[str], str]]:
    """(method, pattern, path) of each operation; paths without parameters come first."""
    ordered = sorted(operations(), key=lambda line: "{" in line[1])
    return [(method, re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(path))), path) for method, path in ordered]


@cache
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def described(method: str, path: str) -> tuple[str, Operation] | None:
    """The path and operation of the table for this request."""
    plain = path.partition("?")[0]
    for known, pattern, line in patterns():
        if known == method and pattern.fullmatch(plain):
            return line, operations()[known, line]
    return None


def check(method: str, path: str, status: int, media: str, content: bytes) -> None:
    """Raises msgspec.ValidationError if the answer does not fit its description."""
    found = described(method, path)
    if found is None:
        return
    line, operation = found
    fault = TeiError if line in SHARED and b'"error_type"' in content else error_of(line)
    if media.startswith("application/json"):
        if status >= 300:
            decoder(fault).decode(content)
        elif line == "/":
            decoder(Root).decode(content)
        else:
            assert operation.answer is not None, f"{method} {line} answers with JSON and has no type"
            decoder(operation.answer).decode(content)
    elif media.startswith(STREAM):
        for data in re.findall(rb"^data: (.+)$", content, re.MULTILINE):
            if data != b"[DONE]":
                decoder(Error if data.startswith(b'{"error"') else operation.event).decode(data)
    elif media == operation.stream:
        for data in content.splitlines():
            decoder(fault if data.startswith(b'{"error"') else operation.event).decode(data)
