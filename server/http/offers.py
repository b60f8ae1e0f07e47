"""Parser: parses HTTP and ignores offers to switch protocols, except for WebSockets.

Owner: loop, one per connection. Java's client offers HTTP/2 with its first request (`Upgrade: h2c`). A server may
ignore the offer and answer the request. But httptools treats the bytes after the head as the other protocol, drops the
body, and would read the body as the next request. So a new parser parses the head again, without `Upgrade`. The first
parser cannot be reused: its state depends on the other headers, such as `Connection: close`.

    POST, Upgrade: h2c | body      head -> declined -> a new parser: head without Upgrade, then the body
"""

from __future__ import annotations

from collections.abc import Callable

import httptools


class Parser:
    """A parser of one connection. Owner: loop. `declined()` returns the head without the offer, or None to accept the
    offer.
    """

    __slots__ = ("_declined", "_parser", "_protocol")

    def __init__(self, protocol: object, declined: Callable[[], bytes | None]) -> None:
        self._protocol = protocol
        self._declined = declined
        self._renew()

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self._protocol)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # the same setting as uvicorn's

    def feed_data(self, data: bytes) -> None:
        left = memoryview(data)
        while True:
            try:
                self._parser.feed_data(left)
                return
            except httptools.HttpParserUpgrade as offer:
                head = self._declined()
                if head is None:
                    raise
                left = left[offer.args[0] :]
            self._renew()
            self._parser.feed_data(head)

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._parser.should_upgrade()


def head_without_offer(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A request's head as received, without its Upgrade headers."""
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    lines += [b"%s: %s" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])
