"""Heap: returns memory that was freed while weights were packed to the system.

Packing makes temporary copies (unpacked, joined, padded) between permanent allocations. Freed copies leave holes that
few later allocations fit, and glibc holds on to all of them: 4-bit experts took more than twice their bytes. A trim
takes a few milliseconds. Thread: the thread that builds the model. In: the number of checkpoint bytes that were packed.
"""

from __future__ import annotations

import ctypes

TRIM_AFTER = 128 << 20  # bytes of the checkpoint between two trims


class Heap:
    """The heap during one load."""

    def __init__(self) -> None:
        self._read = 0  # bytes since the last trim

    def packed(self, num_bytes: int) -> None:
        """Counts packed bytes; trims after TRIM_AFTER bytes."""
        self._read += num_bytes
        if self._read >= TRIM_AFTER:
            self.trim()

    def trim(self) -> None:
        """Returns the free pages of all arenas to the system, if the allocator is glibc's."""
        self._read = 0
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
