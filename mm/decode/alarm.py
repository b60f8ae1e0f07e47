"""Alarm: how the loop stops work that runs in a pool thread.

Owner: the loop makes and trips it; one pool thread reads it. A thread cannot be interrupted, so decoders ask between
frames, chunks and packets. In: a time limit that starts with the work. Out: MediaError from `check` once the time is
over or nobody waits any more.
"""

from __future__ import annotations

import time

from mm.errors import MediaError


class Alarm:
    """A deadline and a flag; each is written by one thread only."""

    __slots__ = ("_deadline", "_tripped")

    def __init__(self, seconds: float = float("inf")) -> None:
        self._deadline = time.monotonic() + seconds
        self._tripped = False

    def trip(self) -> None:
        """Nobody waits for the result (loop)."""
        self._tripped = True

    def check(self) -> None:
        """Raise when the work should end (pool)."""
        if self._tripped or time.monotonic() > self._deadline:
            raise too_complex()


def too_complex() -> MediaError:
    return MediaError(400, "media_too_complex", "decoding this media takes longer than the server allows")
