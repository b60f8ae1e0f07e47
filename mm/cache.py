"""ProcessorCache: processed media by content, an LRU cache with a capacity in bytes.

Owner: loop. In: a key (scope of the caller, digest of content and settings) and processed media. Out: the same arrays
again. Names (a client's `uuid`) only point to keys of the same scope. Invariant: `used` is the sum of entry sizes and
never exceeds `capacity`.
"""

from __future__ import annotations

from collections import OrderedDict

from mm.item import Processed

Key = tuple[bytes, bytes]  # scope, digest
_ENTRY_BYTES = 1024  # bytes of an entry in addition to its arrays
_MAX_NAMES = 65536


class ProcessorCache:
    """A cache bounded in bytes; with capacity 0 it stores nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.hits = 0
        self.queries = 0
        self._entries: OrderedDict[Key, Processed] = OrderedDict()
        self._names: OrderedDict[tuple[bytes, bytes], Key] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Processed | None:
        self.queries += 1
        entry = self._entries.get(key)
        if entry is not None:
            self.hits += 1
            self._entries.move_to_end(key)
        return entry

    def holds(self, key: Key) -> bool:
        """Whether the cache has this key now. A single look-up in a dict, so other threads may call it."""
        return key in self._entries

    def put(self, key: Key, processed: Processed) -> None:
        size = processed.nbytes + _ENTRY_BYTES
        if key in self._entries or size > self.capacity:
            return
        self._entries[key] = processed
        self.used += size
        while self.used > self.capacity:
            _, dropped = self._entries.popitem(last=False)
            self.used -= dropped.nbytes + _ENTRY_BYTES

    def name(self, name: bytes, key: Key) -> None:
        """Let `name` point to `key`, for callers of the key's scope."""
        self._names[(key[0], name)] = key
        self._names.move_to_end((key[0], name))
        if len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)

    def named(self, scope: bytes, name: bytes) -> Processed | None:
        key = self._names.get((scope, name))
        return None if key is None else self.get(key)

    def clear(self) -> None:
        self._entries.clear()
        self._names.clear()
        self.used = 0
