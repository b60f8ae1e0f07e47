"""Flows and Backlog: whose requests wait, as the numbers that the scheduler takes turns by.

Owner: device thread, through Admission. In: the name of the caller of a request (an API key's name or an address; made
by the server). Out: a number per caller for as long as it has a row; and, for inputs that no slot is free for, whose is
next. Both go by turns, so that one caller's crowd does not stand in front of another one's request.
"""

from __future__ import annotations

from collections import OrderedDict

from _fast.turns import Turns
from engine.base.request import Request


class Flows:
    """Numbers of callers that have rows."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._numbers: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._free = list(range(turns.num_flows - 1, -1, -1))

    def take(self, name: str) -> int:
        """The number of a caller that gets a row more; there are as many numbers as slots."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._free.pop()
            self._turns.forget(number)
        self._rows[name] = self._rows.get(name, 0) + 1
        return number

    def give(self, name: str) -> None:
        """A row of the caller has ended."""
        self._rows[name] -= 1
        if not self._rows[name]:
            del self._rows[name]
            self._free.append(self._numbers.pop(name))

    def __len__(self) -> int:
        return len(self._numbers)


class Backlog:
    """Inputs without a slot, one caller's after the other's."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[int, tuple[Request, int]]] = OrderedDict()
        self._flow_of: dict[int, str] = {}

    def add(self, request: Request, first_id: int) -> None:
        """All inputs of a request, behind the caller's others."""
        line = self._lines.setdefault(request.flow, OrderedDict())
        for k in range(request.n):
            line[first_id + k] = request, k
            self._flow_of[first_id + k] = request.flow

    def pop(self) -> tuple[int, Request, int]:
        """(number, request, which of its inputs) that comes next; the caller's turn is over then."""
        flow = next(iter(self._lines))
        device_id, (request, k) = next(iter(self._lines[flow].items()))
        self.discard(device_id)
        if flow in self._lines:
            self._lines.move_to_end(flow)
        return device_id, request, k

    def discard(self, device_id: int) -> None:
        """The input is wanted no more, if it is here."""
        flow = self._flow_of.pop(device_id, None)
        if flow is not None:
            del self._lines[flow][device_id]
            if not self._lines[flow]:
                del self._lines[flow]

    def __len__(self) -> int:
        return len(self._flow_of)
