"""Head: counts a request's head while it arrives, and the trailers after its body (SECURITY S1).

Owner: loop, one per connection. In: parser callbacks, sizes of pieces. Out: HeadLimit, which stops the parser, and the
refusal. The parser reports a header only when it is complete, so received bytes are counted as well: those of whole
pieces, but never bytes that precede the head.
"""

from __future__ import annotations

from server.errors import ApiError
from server.flags.config import LimitsConfig


class HeadLimit(Exception):
    """Raised in a parser callback; the parser stops and the refusal is sent."""


class Head:
    """The counts of one head. Owner: loop."""

    __slots__ = (
        "_bytes",
        "_count",
        "_fresh",
        "_limits",
        "_received",
        "_target",
        "body_length",
        "open",
        "refusal",
        "silent",
    )

    def __init__(self, limits: LimitsConfig) -> None:
        self.open = False  # whether its end has not arrived yet
        self.silent = True  # whether nothing has arrived on this connection
        self.body_length = 0  # from Content-Length; 0: no body, or a chunked body
        self.refusal: ApiError | None = None
        self._limits = limits
        self._clear()

    def _clear(self) -> None:
        self._bytes = 0  # bytes in names and values of complete headers
        self._count = 0
        self._target = 0
        self._received = 0
        self._fresh = True  # whether it began in the current piece

    @property
    def most(self) -> int:
        """The most bytes that a head may have."""
        return self._limits.max_header_bytes + self._limits.max_target_bytes

    def begin(self) -> None:
        self._clear()
        self.open = True
        self.body_length = 0

    def end(self) -> None:
        """The head has ended; counts restart for trailers."""
        self.open = False
        self._bytes = self._count = 0

    def count_target(self, target: bytes) -> None:
        self._target += len(target)
        if self._target > self._limits.max_target_bytes:
            raise self._over(f"path and query are longer than {self._limits.max_target_bytes} bytes")

    def count(self, name: bytes, value: bytes) -> bool:
        """Count one header or trailer; True if it is a header."""
        limits = self._limits
        kind = "headers" if self.open else "trailers"
        self._bytes += len(name) + len(value) + 4
        self._count += 1
        if self._bytes > limits.max_header_bytes:
            raise self._over(f"the {kind} are longer than {limits.max_header_bytes} bytes")
        if self._count > limits.max_headers:
            raise self._over(f"there are more than {limits.max_headers} {kind}")
        if len(name) == 14 and name.lower() == b"content-length" and value.isdigit() and len(value) < 20:
            self.body_length = int(value)
        return self.open

    def is_too_long(self, piece: int, whole: bool) -> bool:
        """Count a piece in which the head has not ended. Returns whether the head is too long. `whole`: the head begins
        with this piece."""
        if not self.open:
            return False
        if whole or not self._fresh:
            self._received += piece
        self._fresh = False
        return self._received > self.most

    def _over(self, text: str) -> HeadLimit:
        self.refusal = ApiError(431, "headers_too_large", text)
        return HeadLimit()
