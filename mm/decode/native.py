"""Settings of the native libraries behind PyAV and Pillow that their Python parts do not reach.

Owner: the pool thread that first imports a library. A library is found among the files that this process has mapped, so
it is the one that decodes. Where it is none of these files (linked in statically, another system), nothing is set.
"""

from __future__ import annotations

import ctypes
import re

LEAST_ALLOCATION = 64 << 20  # bytes; frames may be larger where --video-max-frame-pixels says so
BYTES_PER_PIXEL = 8


def mapped(name: str) -> ctypes.CDLL | None:
    """A library of this process."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as table:
            found = re.search(rf"\S*/{name}[-.\w]*\.so[.\w]*$", table.read(), re.MULTILINE)
        return None if found is None else ctypes.CDLL(found[0])
    except OSError:
        return None


class Allocations:
    """The largest piece of memory that FFmpeg may ask for at one time: no table or picture of a file needs more than a
    frame does. What a file promises beyond that fails inside FFmpeg, which calls the file damaged."""

    def __init__(self) -> None:
        self._library = mapped("libavutil")
        self._set = 0
        if self._library is not None:
            self._library.av_max_alloc.argtypes = [ctypes.c_size_t]
            self._library.av_max_alloc.restype = None

    def bound(self, frame_pixels: int) -> None:
        """Before a file is opened."""
        most = max(LEAST_ALLOCATION, frame_pixels * BYTES_PER_PIXEL)
        if self._library is not None and most != self._set:
            self._library.av_max_alloc(most)
            self._set = most


def silence_tiff() -> None:
    """libtiff writes what it thinks of a file to standard error, with words of the file."""
    library = mapped("libtiff")
    if library is not None:
        for kind in ("Error", "Warning"):
            handler = getattr(library, f"TIFFSet{kind}Handler")
            handler.argtypes, handler.restype = [ctypes.c_void_p], ctypes.c_void_p
            handler(None)
