"""Heap: memory that was freed while weights were packed goes back to the system.

A layer's experts are unpacked, joined and padded in copies between what stays. Freed copies leave holes that few later
requests fit, and glibc keeps all holes: experts in four bits took more than twice their bytes. A trim takes a few
milliseconds. Thread: the one that builds the model. In: how many bytes of a checkpoint became weights.
"""

from __future__ import annotations

import ctypes

TRIM_AFTER = 128 << 20  # bytes of the checkpoint


class Heap:
    """The heap during one load."""

    def __init__(self) -> None:
        self._read = 0  # bytes since the last trim

    def packed(self, num_bytes: int) -> None:
        """Counts bytes that were copied into the model; after TRIM_AFTER of them, trims."""
        self._read += num_bytes
        if self._read >= TRIM_AFTER:
            self.trim()

    def trim(self) -> None:
        """Returns the free pages of all arenas to the system, where the allocator is glibc's."""
        self._read = 0
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
