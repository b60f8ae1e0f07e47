"""Recent: an LRU cache of tables with a bound on their total size. Owner: device thread."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A small LRU cache; an entry larger than the bound is not stored."""

    __slots__ = ("_entries", "_limit", "total")

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._limit = limit
        self.total = 0  # summed size of the entries, <= limit

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        assert key not in self._entries
        if size > self._limit:
            return
        self._entries[key] = (value, size)
        self.total += size
        while self.total > self._limit:
            _, (_, gone) = self._entries.popitem(last=False)
            self.total -= gone

    def __len__(self) -> int:
        return len(self._entries)
