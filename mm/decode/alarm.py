"""Alarm: how the loop stops work that runs in a pool thread.

Owner: the loop makes and trips it; one pool thread begins it, and that thread and the decoders that it starts read it.
A thread cannot be interrupted, so decoders ask between frames, chunks and packets. In: a time limit, which starts with
the work and not while it waits for a thread. Out: MediaError from `check` once the time is over or no caller waits
any more.
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
        """The work has its thread (pool)."""
        self._deadline = time.monotonic() + self._seconds

    def remaining(self) -> float:
        """Seconds until the work must have ended; all of them while it has not begun."""
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
