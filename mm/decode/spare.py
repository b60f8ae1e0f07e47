"""SparePages: memory for the next decoded picture, mapped before the picture comes.

Pixels that are kept cannot lie where the last ones lay, and the system hands out new memory page by page, at the first
touch of each: a millisecond for 1024 x 1024, while somebody waits. So the pool maps one spare after a picture instead.
Owner: the loop asks `wants`; any pool thread takes or fills; the deque between them holds one spare at most, never of
more than LARGEST bytes. What is taken belongs to its array alone and goes back to the system with it.

    picture   | header | decode into the spare | tables | -> first token
    pool                                                | next spare |
"""

from __future__ import annotations

import mmap
from collections import deque

import numpy as np

SMALLEST, LARGEST = 512 << 10, 16 << 20  # bytes; a mapping of its own does not pay for less
_PAGE = 4096


def new_pixels(size: int) -> np.ndarray:
    """uint8 [size], not written yet."""
    return np.empty(size, np.uint8)


class SparePages:
    """At most one block of pages that have been touched."""

    def __init__(self) -> None:
        self._ready: deque[mmap.mmap] = deque(maxlen=1)

    def wants(self, size: int) -> bool:
        """Whether a picture of so many bytes, had it come now, would have found nothing that suits it."""
        if not SMALLEST <= size <= LARGEST:
            return False
        return not any(_suits(pages, size) for pages in tuple(self._ready))

    def fill(self, size: int) -> None:
        """Map so many bytes and touch every page; what lay ready goes (pool)."""
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(pages, np.uint8)[::_PAGE] = 0  # lets the GIL go
        self._ready.append(pages)

    def take(self, size: int) -> np.ndarray:
        """uint8 [size]: the spare, cut to this size, or new memory where it does not suit (pool)."""
        try:
            pages = self._ready.pop()
        except IndexError:
            return new_pixels(size)
        if not _suits(pages, size):
            self._ready.append(pages)
            return new_pixels(size)
        if len(pages) > size:
            pages.resize(size)  # the rest goes back at once: what is counted is what is held
        return np.frombuffer(pages, np.uint8)


def _suits(pages: mmap.mmap, size: int) -> bool:
    """Large enough, and not much of it for nothing."""
    return size <= len(pages) <= 2 * size
