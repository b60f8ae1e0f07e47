"""A stand-in driver of several devices: streams with short queues interleave at will, and launches block.

A stream holds LIMIT operations; a launch into a full stream returns only after one of its operations has ended, as a
driver's does after about a thousand. A graph is a list of small actions. An exchange ends on a rank only after all
ranks have reached it. A pass of a drafter guesses on rank 0, and ends on another rank only after rank 0's pass. If no
stream can go on while the host waits, the order of launches was wrong.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from _fast.launcher import Launcher
from _fast.layout import GraphKind, Header, record_len
from _fast.params import SlotParams
from _fast.plan import StepPlan
from tests.fast.oracles.runtime import CALLS

LIMIT = 4
PREP, EXCHANGE, SAMPLE, MARK, SET_TURN, PASS = range(6)
HANDLES = {
    GraphKind.PREP: [PREP],
    GraphKind.DECODE: [EXCHANGE, EXCHANGE],
    GraphKind.MIXED: [EXCHANGE, EXCHANGE],
    GraphKind.SAMPLE: [EXCHANGE, SAMPLE, EXCHANGE],
    GraphKind.STEP: [PREP, EXCHANGE, EXCHANGE, EXCHANGE, SAMPLE, EXCHANGE],
    GraphKind.DRAFT: [PASS],
    GraphKind.FURTHER: [PASS],
}
TOKEN = 5
CALLED: list[dict[str, Any]] = []  # referenced here, because a launcher calls its driver when it is freed


@dataclass
class Stream:
    """One rank's queue, and what its device knows."""

    waiting: deque[list[Any]] = field(default_factory=deque)  # operations: lists of (action, argument)
    turn: int = 0
    record: int = -1  # that the newest prep has read
    reached: int = 0  # exchanges
    is_inside: bool = False  # of an exchange that it has reached
    passes: int = 0  # that have ended


class Driver:
    """The functions of a runtime, for a Launcher."""

    def __init__(self, ranks: int, seed: int = 0, awaits: Callable[[int], bool] = lambda _rank: True) -> None:
        """`awaits`: whether waiting for an event of a rank waits, which a test denies for a wrong launcher."""
        self.streams, self.random, self.faults = [Stream() for _ in range(ranks)], random.Random(seed), set[str]()
        self._order = self.streams[:]
        self.records: list[np.ndarray] = []
        self.ring: list[np.ndarray] = []
        self.events: list[tuple[int, int]] = []  # (times recorded, times reached)
        self.owner: dict[int, int] = {}  # event -> rank that recorded it
        self.launched: list[int] = []  # ranks, in the order of launches
        self._awaits = awaits
        self._calls = {name: self._made(name) for name in CALLS}
        CALLED.append(self._calls)

    def _made(self, name: str) -> Any:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        kinds: dict[str, list[Any]] = {
            "GraphLaunch": [pointer, pointer],
            "MemcpyAsync": [pointer, pointer, size, ctypes.c_int, pointer],
            "EventCreateWithFlags": [ctypes.POINTER(pointer), ctypes.c_uint],
            "EventDestroy": [pointer],
            "EventRecord": [pointer, pointer],
            "EventQuery": [pointer],
            "EventSynchronize": [pointer],
            "EventElapsedTime": [pointer, pointer, pointer],
        }
        if name not in kinds:
            return ctypes.CFUNCTYPE(pointer, ctypes.c_int)(lambda _code: None)
        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds[name])(getattr(self, name))

    def addresses(self) -> dict[str, int]:
        return {name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in self._calls.items()}

    # -- what a launcher calls ----------------------------------------------------------------------------------------

    def GraphLaunch(self, graph: int, stream: int) -> int:
        rank, kind = stream - 1, GraphKind(graph // 1000 - 1)
        if graph % 1000 // 100 != rank:
            self.faults.add(f"rank {graph % 1000 // 100}'s graph on rank {rank}")
        self.launched.append(rank)
        steps = [int(record[Header.STEP_LOW]) for record in self.records]  # what a prep launched now must find
        return self._push(rank, [(action, steps) for action in self.actions(kind, rank)])

    def actions(self, kind: GraphKind, _rank: int) -> list[int]:
        """What a rank's graph of a kind does."""
        return HANDLES[kind]

    def MemcpyAsync(self, to: int, source: int, _size: int, _kind: int, stream: int) -> int:
        if to != stream:
            self.faults.add(f"rank {to - 1}'s counter on rank {stream - 1}")
        return self._push(stream - 1, [(SET_TURN, ctypes.c_int32.from_address(source).value)])

    def EventCreateWithFlags(self, event: Any, _flags: int) -> int:
        self.events.append((0, 0))
        event[0] = len(self.events)
        return 0

    def EventDestroy(self, _event: int) -> int:
        return 0

    def EventRecord(self, event: int, stream: int) -> int:
        times, reached = self.events[event - 1]
        self.events[event - 1], self.owner[event] = (times + 1, reached), stream - 1
        return self._push(stream - 1, [(MARK, (event, times + 1))])

    def EventQuery(self, event: int) -> int:
        times, reached = self.events[event - 1]
        return 600 if reached < times else 0

    def EventSynchronize(self, event: int) -> int:
        if not self._awaits(self.owner[event]):
            return 0
        return self._until(lambda: self.EventQuery(event) == 0)

    def EventElapsedTime(self, _into: int, _start: int, _end: int) -> int:
        return 0

    def finish(self) -> None:
        """Runs all that was launched."""
        while self._go_on():
            pass

    # -- the devices --------------------------------------------------------------------------------------------------

    def _push(self, rank: int, operation: list[Any]) -> int:
        code = self._until(lambda: len(self.streams[rank].waiting) < LIMIT)
        self.streams[rank].waiting.append(operation)
        if self.random.random() < 0.3:
            self._go_on()
        return code

    def _until(self, ready: Callable[[], bool]) -> int:
        while not ready():
            if not self._go_on():
                self.faults.add("deadlock")
                return 999
        return 0

    def _go_on(self) -> bool:
        """Runs an action of the first stream that can go on, in an order that changes now and then; False: none can."""
        if self.random.random() < 0.05:
            self.random.shuffle(self._order)
        return any(stream.waiting and self._acted(stream, stream.waiting[0]) for stream in self._order)

    def _acted(self, stream: Stream, operation: list[Any]) -> bool:
        action, given = operation[0]
        if action == EXCHANGE:
            if not stream.is_inside:
                stream.is_inside, stream.reached = True, stream.reached + 1
                return True
            if min(other.reached for other in self.streams) < stream.reached:
                return False
            stream.is_inside = False
        elif action == PASS:
            if stream is not self.streams[0] and self.streams[0].passes <= stream.passes:
                return False
            stream.passes += 1
        elif action == PREP:
            stream.record = stream.turn
            if int(self.records[stream.turn][Header.STEP_LOW]) != given[stream.turn]:
                self.faults.add("a record was rewritten unread")
            stream.turn = (stream.turn + 1) % len(self.records)
        elif action == SAMPLE and stream is self.streams[0]:
            self.ring[stream.record][:] = TOKEN
        elif action == SET_TURN:
            stream.turn = given
        elif action == MARK:
            event, times = given
            self.events[event - 1] = self.events[event - 1][0], times
        operation.pop(0)
        if not operation:
            stream.waiting.popleft()
        return True


class RanksRig:
    """Records, ring and graphs of several ranks over a Driver, as tests.fast.oracles.runtime.Rig for one."""

    def __init__(self, driver: Driver, rows: int, tokens: int, updates: int, max_slots: int, width: int = 1) -> None:
        """`width`: places of a row's run."""
        self.driver = driver
        size = record_len(rows, tokens, updates, 0)
        self.records = driver.records = [np.zeros(size, np.int32) for _ in range(3)]
        self.ring = driver.ring = [np.zeros(rows * width, np.int32) for _ in range(3)]
        self.plans = [StepPlan(rows, tokens, updates, record, k, width, 0) for k, record in enumerate(self.records)]
        self.params = SlotParams(max_slots)
        lines, places = ([array.ctypes.data for array in arrays] for arrays in (self.ring, self.records))
        self.launcher = Launcher(driver.addresses(), 1, places, 1, lines, rows)
        ranks = range(len(driver.streams))
        for rank in ranks[1:]:
            self.launcher.add_rank(rank + 1, rank + 1)
        sizes = {GraphKind.PREP: [1], GraphKind.MIXED: [16, tokens], GraphKind.SAMPLE: [1, 2, 4, rows * width]}
        for kind in GraphKind:
            for each in sizes.get(kind, [1, 2, 4, rows]):
                handles = [1000 * (kind + 1) + 100 * rank for rank in ranks]
                self.launcher.set_graph(kind, 0, each, *handles)
