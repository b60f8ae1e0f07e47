"""ResponseStore: finished and running responses by key and id, bounded in number, bytes and time (SECURITY S7).

Owner: loop. A Turn holds one request's input items and its answer, and refers to the turn before it, so a conversation
of a hundred turns is stored once. Its bytes count as long as a stored response or a later turn needs it. If there is no
room, the oldest response of the key that holds the most is removed, so no key displaces another key's few responses;
responses that still run in the background are not removed. A response is found by its whole id and its key.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from server.output.response_record import ResponseRecord

OVERHEAD = 1024  # approximate bytes of Python objects per stored response
Item = dict[str, Any]


class Running(Protocol):
    """A response that runs in the background, as its readers access it."""

    record: ResponseRecord

    def snapshot(self) -> dict[str, Any]:
        """The current state of the response."""

    async def cancel(self) -> None:
        """End the response; returns when its end is stored."""


class Turn:
    """Items of one request and its answer, as JSON; frozen once stored."""

    __slots__ = ("inputs", "outputs", "parent", "users")

    def __init__(self, inputs: bytes, parent: Turn | None) -> None:
        self.inputs = inputs
        self.outputs = b"[]"
        self.parent = parent
        self.users = 0  # number of stored responses and stored later turns

    @property
    def size(self) -> int:
        return len(self.inputs) + len(self.outputs) + OVERHEAD

    def history(self) -> list[Item]:
        """The conversation's items before its newest answer; any thread."""
        return (self.parent.items() if self.parent else []) + orjson.loads(self.inputs)

    def items(self) -> list[Item]:
        """The items of the whole conversation, from its beginning; any thread."""
        chain: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            chain.append(turn)
            turn = turn.parent
        return [item for turn in reversed(chain) for part in (turn.inputs, turn.outputs) for item in orjson.loads(part)]


@dataclass(slots=True, eq=False)
class Stored:
    """One response. `body` is its final JSON; before the end it is empty and `running` has the state."""

    key: str
    name: str
    turn: Turn
    body: bytes = b""
    item_ids: tuple[str, ...] = ()
    cuts: bytes = b""  # boundaries between the deltas of its stream
    running: Running | None = None
    expires: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the response itself, without its turns."""
        return len(self.body) + len(self.cuts)

    @property
    def record(self) -> ResponseRecord:
        """The record of its events."""
        return self.running.record if self.running is not None else ResponseRecord.of(self.body, self.cuts)


class ResponseStore:
    """All stored responses. Owner: loop."""

    def __init__(self, most: int, ttl: float, most_bytes: int) -> None:
        self.most = most
        self.ttl = ttl
        self.most_bytes = most_bytes
        self.counts: Counter[str] = Counter()  # responses per key
        self.bytes: Counter[str] = Counter()  # per key; all turns of a conversation belong to one key
        self.entries: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._items: dict[tuple[str, str], Stored] = {}  # key: (key, id of an output item)
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def used(self) -> int:
        """Bytes of all stored responses."""
        return self.bytes.total()

    @property
    def running(self) -> int:
        return sum(entry.running is not None for entry in self.entries.values())

    def get(self, key: str, name: str) -> Stored | None:
        self._purge()
        return self.entries.get((key, name))

    def items(self, key: str, ids: Iterable[str]) -> dict[str, Item]:
        """Output items of stored responses, by id; unknown ids are left out."""
        found: dict[str, Item] = {}
        for name in ids:
            entry = self._items.get((key, name))
            if entry is not None and name not in found:
                found |= {item["id"]: item for item in orjson.loads(entry.turn.outputs)}
        return found

    def add(self, entry: Stored) -> None:
        """Add a response that has ended or begins to run; replaces one of the same key and name."""
        known = self.entries.get((entry.key, entry.name))
        if known is not None:
            self.remove(known)
        self.entries[entry.key, entry.name] = entry
        self.counts[entry.key] += 1
        self._retain(entry.key, entry.turn)
        self._settle(entry)

    def finish(self, entry: Stored, body: bytes, outputs: list[Item], cuts: bytes) -> None:
        """Store the end of a running response; no effect if it was removed meanwhile."""
        entry.running = None
        if self.entries.get((entry.key, entry.name)) is not entry:
            return
        before = entry.turn.size
        entry.turn.outputs = orjson.dumps(outputs)
        self.bytes[entry.key] += entry.turn.size - before
        entry.body, entry.cuts = body, cuts
        entry.item_ids = tuple(item["id"] for item in outputs)
        self.entries.move_to_end((entry.key, entry.name))
        self._settle(entry)

    def remove(self, entry: Stored) -> None:
        if self.entries.pop((entry.key, entry.name), None) is None:
            return
        self.counts[entry.key] -= 1
        self.bytes[entry.key] -= entry.size
        for name in entry.item_ids:
            self._items.pop((entry.key, name), None)
        self._release(entry.key, entry.turn)
        if not self.counts[entry.key]:
            del self.counts[entry.key], self.bytes[entry.key]

    def _settle(self, entry: Stored) -> None:
        """Set an entry's expiry, and remove old entries beyond the bounds."""
        self.bytes[entry.key] += entry.size
        for name in entry.item_ids:
            self._items[entry.key, name] = entry
        entry.expires = asyncio.get_running_loop().time() + self.ttl
        while len(self.entries) > self.most or self.used > self.most_bytes:
            oldest = self._oldest(self.counts if len(self.entries) > self.most else self.bytes)
            if oldest is None:
                break
            self.remove(oldest)
        self._wind()

    def _oldest(self, held: Counter[str]) -> Stored | None:
        """The oldest ended response of the key that holds the most; None if all responses still run."""
        ended: dict[str, Stored] = {}
        for entry in self.entries.values():
            if entry.running is None:
                ended.setdefault(entry.key, entry)
        return ended[max(ended, key=held.__getitem__)] if ended else None

    def _purge(self) -> None:
        now = asyncio.get_running_loop().time()
        for entry in list(self.entries.values()):
            if entry.running is None:
                if entry.expires > now:
                    return
                self.remove(entry)

    def _wind(self) -> None:
        """Start the one timer that removes expired responses."""
        if self._timer is None and self.entries:
            self._timer = asyncio.get_running_loop().call_later(max(1.0, self.ttl / 8), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._purge()
        self._wind()

    def _retain(self, key: str, turn: Turn | None) -> None:
        while turn is not None:
            turn.users += 1
            if turn.users > 1:
                return
            self.bytes[key] += turn.size
            turn = turn.parent

    def _release(self, key: str, turn: Turn | None) -> None:
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self.bytes[key] -= turn.size
            turn = turn.parent
