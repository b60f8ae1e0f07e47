"""Settings of the native libraries of PyAV and Pillow that their Python APIs do not expose.

Owner: the pool thread that first imports a library. A library is searched among the files that this process has mapped,
so the settings reach the library that decodes. If none of these files is the library (static linking, other systems),
nothing is set.
"""

from __future__ import annotations

import ctypes
import re

LEAST_ALLOCATION = 64 << 20  # bytes; larger if --video-max-frame-pixels allows larger frames
BYTES_PER_PIXEL = 8


def mapped(name: str) -> ctypes.CDLL | None:
    """The library of this name that this process has mapped, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as table:
            found = re.search(rf"\S*/{name}[-.\w]*\.so[.\w]*$", table.read(), re.MULTILINE)
        return None if found is None else ctypes.CDLL(found[0])
    except OSError:
        return None


class Allocations:
    """A limit on each single allocation of FFmpeg: no table or picture of a file needs more bytes than a frame does. An
    allocation beyond the limit fails inside FFmpeg, which reports the file as damaged."""

    def __init__(self) -> None:
        self._library = mapped("libavutil")
        self._set = 0
        if self._library is not None:
            self._library.av_max_alloc.argtypes = [ctypes.c_size_t]
            self._library.av_max_alloc.restype = None

    def bound(self, frame_pixels: int) -> None:
        """Set the limit, before a file is opened."""
        most = max(LEAST_ALLOCATION, frame_pixels * BYTES_PER_PIXEL)
        if self._library is not None and most != self._set:
            self._library.av_max_alloc(most)
            self._set = most


def silence_tiff() -> None:
    """Turn off libtiff's messages: it writes to standard error, and quotes the file."""
    library = mapped("libtiff")
    if library is not None:
        for kind in ("Error", "Warning"):
            handler = getattr(library, f"TIFFSet{kind}Handler")
            handler.argtypes, handler.restype = [ctypes.c_void_p], ctypes.c_void_p
            handler(None)
