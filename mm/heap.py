"""Heap: the memory that decoders have freed goes back to the system.

Owner: any thread may call; the loader calls in the pool, when no request loads media. glibc keeps freed buffers in the
arena of the thread that took them, and finds few of them again. Of 7,500 small media, of which half were left, 24 to 65
MiB lay free in arenas, growing slowly, while 132 to 133 MiB were in use throughout. A call takes 3 to 5 ms for those.
"""

from __future__ import annotations

import ctypes

TRIM_AFTER = 256 << 20  # bytes decoded since the last call: below that little can lie free


def trim_heap() -> bool:
    """Returns free pages of all arenas; says whether the system's allocator can do so (glibc's can)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
