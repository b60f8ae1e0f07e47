"""Trimming: returns freed memory to the system once there is enough of it, or when no request is open.

Owner: loop. In: once a second, the bytes that the process holds, and whether a request is open. Otherwise, free memory
between used buffers stays with the process (mm/heap). A trim takes a thread of the pool some milliseconds.

    held since the last trim   + 32 MiB: trim        + 4 MiB and no request is open: trim
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from mm.heap import trim_heap

MUCH, IDLE = 32 << 20, 4 << 20  # growth in bytes since the last trim that causes a trim: with open requests, without


class Submits(Protocol):
    """The thread pool's `submit`."""

    def submit(self, work: Callable[[], bool], /) -> Future[bool]: ...


class Trimming:
    """Decides when to trim, at each `look`."""

    def __init__(self, pool: Submits) -> None:
        self._pool = pool
        self._least: int | None = None  # fewest bytes held since the last trim
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
