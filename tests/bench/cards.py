"""Cards: which GPUs of a machine are free, so that benchmarks of a few GPUs each run at the same time.

Thread-safe. A process gets its GPUs by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Cards:
    """The free GPUs among `count`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = set(range(count))
        self._changed = threading.Condition()

    def take(self, wanted: int) -> list[int]:
        """Wait until so many GPUs are free, and take the first of them. Raises ValueError for more than there are."""
        if wanted > self._count:
            raise ValueError(f"{wanted} GPUs are wanted, and there are {self._count}")
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= wanted)
            taken = sorted(self._free)[:wanted]
            self._free.difference_update(taken)
        return taken

    @contextmanager
    def giving_back(self, taken: list[int]) -> Iterator[dict[str, str]]:
        """The environment of a process on these GPUs; afterwards they are free."""
        try:
            yield {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, taken))}
        finally:
            with self._changed:
                self._free.update(taken)
                self._changed.notify_all()
