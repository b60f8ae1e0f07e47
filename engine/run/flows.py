"""Flows and Outside: fairness among callers. Flows numbers the callers; Outside queues requests at a closed gate.

Owner: device thread, through Admission. In: the name of a request's caller (an API key's name or an address, set by
the server). Out: a number for each caller that has a row, and the next requests that wait at a gate of the executor.
The scheduler and Outside serve callers round-robin, so many requests of one caller do not delay another caller. Idle
requests have lines of their own, which are served after all others.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice, zip_longest
from typing import Generic, TypeVar

from _fast.turns import Turns

T = TypeVar("T")
IDLE_LINE = "\0"  # beginning of the names of idle requests' lines in Outside


class Flows:
    """Assigns a number to each caller that has rows."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._numbers: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._free = list(range(turns.num_flows - 1, -1, -1))

    def take(self, name: str) -> int:
        """Counts one more row of a caller and returns the caller's number. There are as many numbers as slots."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._free.pop()
            self._turns.forget(number)
        self._rows[name] = self._rows.get(name, 0) + 1
        return number

    def give(self, name: str) -> None:
        """Counts one row less; the number of a caller without rows is free again."""
        self._rows[name] -= 1
        if not self._rows[name]:
            del self._rows[name]
            self._free.append(self._numbers.pop(name))

    def __len__(self) -> int:
        return len(self._numbers)


class Outside(Generic[T]):
    """Requests that wait outside the scheduler, by the engine's number; callers are served round-robin.

    Requests with the same key wait for the same gate; keys are in the order of their first requests.
    """

    def __init__(self) -> None:
        # By key, then by caller; the next caller is first.
        self._lines: dict[bytes, OrderedDict[str, OrderedDict[int, T]]] = {}
        self._line_of: dict[int, tuple[bytes, str]] = {}
        self.num_keyed = 0  # requests with a key
        self._num_idle = 0

    def add(self, device_id: int, key: bytes, flow: str, waiting: T) -> None:
        """Appends a request to its caller's queue."""
        self._lines.setdefault(key, OrderedDict()).setdefault(flow, OrderedDict())[device_id] = waiting
        self._line_of[device_id] = key, flow
        self.num_keyed += bool(key)
        self._num_idle += flow.startswith(IDLE_LINE)

    def keys(self, count: int) -> list[bytes]:
        """The empty key, if a request has it, and the first `count` other keys."""
        plain = [b""] if b"" in self._lines else []
        return plain + list(islice((key for key in self._lines if key), count))

    def first(self, key: bytes, count: int) -> list[tuple[int, T]]:
        """The next `count` entries (number, request): the first of each caller, then the second of each, and so on."""
        lines = self._lines[key]
        if len(lines) == 1:
            (line,) = lines.values()
            return list(islice(line.items(), count))
        found = in_turns([line for flow, line in lines.items() if not flow.startswith(IDLE_LINE)], count)
        if self._num_idle and len(found) < count:
            found += in_turns([line for flow, line in lines.items() if flow.startswith(IDLE_LINE)], count - len(found))
        return found

    def enter(self, device_id: int) -> bool:
        """Removes a request and ends its caller's turn. Returns whether the request was in the queue."""
        key, flow = self._line_of.get(device_id, (b"", ""))
        if not self.discard(device_id):
            return False
        if flow in self._lines.get(key, ()):
            self._lines[key].move_to_end(flow)
        return True

    def discard(self, device_id: int) -> bool:
        """Removes a request. Returns whether the request was in the queue."""
        key, flow = self._line_of.pop(device_id, (b"", None))
        if flow is None:
            return False
        self.num_keyed -= bool(key)
        self._num_idle -= flow.startswith(IDLE_LINE)
        lines = self._lines[key]
        del lines[flow][device_id]
        if not lines[flow]:
            del lines[flow]
        if not lines:
            del self._lines[key]
        return True

    def __contains__(self, device_id: int) -> bool:
        return device_id in self._line_of

    def __len__(self) -> int:
        return len(self._line_of)


def in_turns(lines: list[OrderedDict[int, T]], count: int) -> list[tuple[int, T]]:
    """Up to `count` entries: the first of each line, then the second of each, and so on."""
    turns = zip_longest(*(islice(line.items(), count) for line in lines))
    return list(islice((entry for turn in turns for entry in turn if entry is not None), count))
