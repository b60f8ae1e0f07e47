"""Alarm: how the loop stops work that runs in a pool thread.

Owner: the loop creates and trips the alarm; one pool thread begins it; this thread and its decoders read it. A thread
cannot be interrupted, so decoders call `check` between frames, chunks and packets. In: a time limit, which counts from
the start of the work, not from its arrival in the queue. Out: `check` raises MediaError when the time is over or no
caller waits any more.
"""

from __future__ import annotations

import time

from mm.errors import MediaError


class Alarm:
    """A deadline and a flag; each is written by one thread only."""

    __slots__ = ("_deadline", "_seconds", "_tripped")

    def __init__(self, seconds: float = float("inf")) -> None:
        self._seconds = seconds
        self._deadline: float | None = None  # time.monotonic() seconds, once begun
        self._tripped = False

    def begin(self) -> None:
        """Start the time limit: a thread has begun the work (pool)."""
        self._deadline = time.monotonic() + self._seconds

    def remaining(self) -> float:
        """Seconds until the work must end; the whole limit before the work begins."""
        return self._seconds if self._deadline is None else self._deadline - time.monotonic()

    def trip(self) -> None:
        """No caller waits for the result any more (loop)."""
        self._tripped = True

    def check(self) -> None:
        """Raise when the work should end (pool)."""
        if self._tripped or (self._deadline is not None and time.monotonic() > self._deadline):
            raise too_complex()


def too_complex() -> MediaError:
    return MediaError(400, "media_too_complex", "decoding this media takes longer than the server allows")
