"""Trimming: memory that was freed goes back to the system once it is much, or when nothing runs.

Owner: loop. In: once a second, the bytes that the process has, and whether a request is open. What lies free between
buffers in use stays with the process otherwise (mm/heap). A trim takes a thread of the pool some milliseconds.

    held since the last trim   + 32 MiB: trim        + 4 MiB and no request is open: trim
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from mm.heap import trim_heap

MUCH, IDLE = 32 << 20, 4 << 20  # bytes above what was held after the last trim: with open requests, without


class Submits(Protocol):
    """The pool of threads."""

    def submit(self, work: Callable[[], bool], /) -> Future[bool]: ...


class Trimming:
    """From the first `look` on."""

    def __init__(self, pool: Submits) -> None:
        self._pool = pool
        self._least: int | None = None  # bytes held since the last trim
        self._running: Future[bool] | None = None

    def look(self, held: int, idle: bool) -> None:
        if self._running is not None:
            if not self._running.done():
                return
            self._running = self._least = None
        least = held if self._least is None else min(self._least, held)
        if held - least > (IDLE if idle else MUCH):
            self._running = self._pool.submit(trim_heap)
        self._least = least
