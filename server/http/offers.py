"""Parser: HTTP as if nobody had offered to go on in another protocol, but for a WebSocket's.

Owner: loop, one per connection. Java's client offers HTTP/2 with its first request (`Upgrade: h2c`). An offer may be
passed over, and the request is then a request as any other; but httptools takes what stands behind its head for the
other protocol, drops the body, and would read the body as the next request. So the head is parsed again without it.

    POST, Upgrade: h2c | body      head -> declined -> head without Upgrade, then the body
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import httptools


class Parser(httptools.HttpRequestParser):
    """Owner: loop. `declined()` is the head to go on with, None where the offer is taken."""

    def __init__(self, protocol: object, declined: Callable[[], bytes | None]) -> None:
        super().__init__(protocol)
        self.declined = declined
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        left = memoryview(data)
        while True:
            try:
                super().feed_data(left)
                return
            except httptools.HttpParserUpgrade as offer:
                head = self.declined()
                if head is None:
                    raise
                left = left[offer.args[0] :]
            super().feed_data(head)


def head_without_offer(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A request's head as it came, without its Upgrade headers."""
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    lines += [b"%s: %s" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])
