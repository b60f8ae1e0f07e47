"""Arrived: bytes that a connection has received but not parsed yet, returned one message at a time.

Owner: loop, one per connection. In: reads, of up to 256 KiB. Out: pieces that begin at most one message, so that the
connection can stop between two pipelined requests. A piece ends after a head or a chunked body, which end with an empty
line, or at the end of a body of known length.

    read      head | body of 5 | head | head | hea
    pieces   |head |body       |head  |head  |hea
"""

from __future__ import annotations

PIECE = 16384  # bytes of a head or of a chunked body that are parsed at a time: 3 ms if each chunk has one byte
_EMPTY_LINE = b"\r\n\r\n"


class Arrived:
    """The unparsed bytes of a connection. Owner: loop."""

    __slots__ = ("_at", "_data")

    def __init__(self) -> None:
        self._data = b""
        self._at = 0

    def __len__(self) -> int:
        return len(self._data) - self._at

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._data = self._data[self._at :] + data if self else data
        self._at = 0

    def take(self, body_left: int) -> bytes:
        """The next piece. `body_left`: bytes that the current message's body still has, 0 if unknown."""
        start, end = self._at, len(self._data)
        if body_left:
            stop = min(end, start + body_left)
        else:
            found = self._data.find(_EMPTY_LINE, start, start + PIECE)
            stop = min(end, start + PIECE) if found < 0 else found + len(_EMPTY_LINE)
        if start == 0 and stop == end:
            piece, self._data = self._data, b""
            return piece
        self._at = stop
        return self._data[start:stop]

    def clear(self) -> None:
        self._data, self._at = b"", 0
