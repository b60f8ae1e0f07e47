"""Memory for decoded pictures: the engine's, for as long as somebody waits, and SparePages where there is none.

Pixels that are kept cannot lie where the last ones lay, and the system hands out new memory page by page, at the first
touch of each: a millisecond for 1024 x 1024, while somebody waits. So they are decoded into memory that the engine
lends, and moved out when the picture is on its way (`give_back`); or, where it lends none, into a spare that the pool
maps after a picture. Owner: the loop asks `wants`; any pool thread takes, fills and gives back; the deque between them
holds one spare at most, never of more than LARGEST bytes. What is taken of it belongs to its array alone and goes back
to the system with it.

    picture   | header | decode into what is lent, or the spare | tables | -> first token
    pool                                                                 | moved out, or next spare |
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable

import numpy as np

from mm.item import Processed

SMALLEST, LARGEST = 512 << 10, 16 << 20  # bytes; a mapping of its own does not pay for less
_PAGE = 4096


def new_pixels(size: int) -> np.ndarray:
    """uint8 [size], not written yet."""
    return np.empty(size, np.uint8)


Lend = Callable[[int], np.ndarray | None]  # bytes -> uint8 [bytes], until no array lies there any more; any thread


def none_lent(size: int) -> None:
    """Where the engine has nothing to lend: it reads what it is given."""


def give_back(processed: Processed) -> None:
    """The pixels, moved to memory of their own (pool); whoever reads them meanwhile reads the same.

    That one exchange is all that ever happens to what has been processed.
    """
    for part in processed.parts:
        part.features["pixels"] = part.features["pixels"].copy()  # lets the GIL go


class SparePages:
    """At most one block of pages that have been touched."""

    def __init__(self) -> None:
        self._ready: deque[mmap.mmap] = deque(maxlen=1)

    @property
    def nbytes(self) -> int:
        """Of what lies ready."""
        return sum(len(pages) for pages in tuple(self._ready))

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
