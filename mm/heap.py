"""Heap: the memory that was freed goes back to the system, where the allocator is glibc's.

Owner: any thread may call; the loader calls in the pool, when no request loads media. What lies free between buffers in
use stays with the process otherwise: of 7,500 small media, of which half were left, 24 to 65 MiB. A call takes 3 to 5
ms for those. In one arena for all threads (server/start/arena) it returns the free end as well.
"""

from __future__ import annotations

import ctypes

TRIM_AFTER = 256 << 20  # bytes decoded since the last call: below that little can lie free


def trim_heap() -> bool:
    """Returns free pages of all arenas; says whether the system's allocator can do so (glibc's can)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
