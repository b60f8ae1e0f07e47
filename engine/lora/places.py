"""Places: which adapter lies in which place on the device, and which requests may enter the scheduler.

Owner: device thread; `Memory.fill` runs on a thread of its own. In: requests with adapters. Out: a place's number for
each row, from 1; 0 is the base model.

    request -> has its adapter a place?  yes: the row holds the place until its slot is reset
                                         no: a free place is filled, the request waits outside the scheduler

A place is free while no row holds it; the least recently used is filled first. A slot is reset once no launched step
contains it, so no step reads a place that is filled. If a request has waited for PATIENCE seconds and no place is free,
the adapter with the fewest rows gets no further rows until its place is free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from engine.lora.adapter import Adapter

log = logging.getLogger("omniloop.engine")

PATIENCE = 2.0  # seconds
RETRY = 5.0  # seconds after a failed fill until the next request tries again


class Memory(Protocol):
    """The device's memory of all places."""

    def fill(self, number: int, adapter: Adapter) -> None:
        """Writes an adapter into place `number`, from 1, which no row uses, and waits until the device has it."""


@dataclass(slots=True)
class Lodging:
    """One place."""

    sha256: bytes = b""  # of the adapter in the place; b"": none
    rows: int = 0  # live rows that hold the place
    used: int = 0  # grows with each use of any place
    ready: bool = True  # False: the place is being filled
    closed_for: bytes = b""  # the adapter that waits for this place, which takes no further rows; b"": none
    error: Exception | None = None  # of the last fill
    failed_at: float = 0.0


class Places:
    """The places of all adapters."""

    def __init__(
        self, count: int, memory: Memory, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`wake`: asks the device thread to check waiting requests again; any thread may call it."""
        self._memory, self._wake, self._clock = memory, wake, clock
        self._lodgings = [Lodging() for _ in range(count + 1)]  # by number; number 0 is not a place
        self._number_of: dict[bytes, int] = {}
        self._filler = ThreadPoolExecutor(1, "omniloop-adapters")
        self._filled: SimpleQueue[tuple[int, float, Exception | None]] = SimpleQueue()  # number, seconds, error
        self._uses = 0
        self.swaps = 0  # fills that have ended
        self.swap_seconds = 0.0

    @property
    def count(self) -> int:
        """Number of places."""
        return len(self._lodgings) - 1

    @property
    def num_used(self) -> int:
        """Places that hold an adapter."""
        return len(self._number_of)

    @property
    def num_rows(self) -> int:
        """Live rows that hold a place."""
        return sum(lodging.rows for lodging in self._lodgings)

    def opens(self, adapter: Adapter, arrival: float) -> bool:
        """Whether a request, which arrived at `arrival` on the clock, may enter now. If its adapter has no place, a
        free place is filled."""
        self._settle()
        number = self._number_of.get(adapter.sha256)
        if number is not None:
            lodging = self._lodgings[number]
            if lodging.error is not None and self._clock() - lodging.failed_at > RETRY:
                self._begin(number, adapter)
                return False
            if lodging.rows == 0:
                lodging.closed_for = b""
            return lodging.ready and not lodging.closed_for
        number = self._free()
        if number:
            self._begin(number, adapter)
        elif self._clock() - arrival > PATIENCE:
            self._close_one(adapter.sha256)
        return False

    def fill(self, adapter: Adapter) -> None:
        """Fills a free place and waits for it, at start."""
        if adapter.sha256 not in self._number_of:
            number = self._free()
            assert number, "there are fewer places than adapters"
            self._begin(number, adapter).result()
            self._settle()

    def number(self, adapter: Adapter) -> int:
        """The number of the adapter's place, after `opens` returned True. Raises the error of its last fill."""
        number = self._number_of[adapter.sha256]
        error = self._lodgings[number].error
        if error is not None:
            raise error
        return number

    def hold(self, number: int) -> None:
        """One more row uses the place."""
        self._lodgings[number].rows += 1
        self._use(number)

    def release(self, number: int) -> None:
        """One row less uses the place; no launched step may contain the row."""
        self._lodgings[number].rows -= 1
        self._use(number)

    def _use(self, number: int) -> None:
        self._uses += 1
        self._lodgings[number].used = self._uses

    def _free(self) -> int:
        """The number of the free place that was used least recently; 0: no place is free."""
        free = [
            (bool(each.sha256), each.used, number)
            for number, each in enumerate(self._lodgings)
            if number and not each.rows and each.ready
        ]
        return min(free)[2] if free else 0

    def _begin(self, number: int, adapter: Adapter) -> Future[None]:
        lodging = self._lodgings[number]
        self._number_of.pop(lodging.sha256, None)
        self._number_of[adapter.sha256] = number
        self._lodgings[number] = Lodging(adapter.sha256, ready=False)
        self._use(number)
        return self._filler.submit(self._fill, number, adapter)

    def _fill(self, number: int, adapter: Adapter) -> None:
        """On the filling thread: fills the place, and reports the end."""
        begun, found = time.perf_counter(), None
        try:
            with torch.inference_mode():
                self._memory.fill(number, adapter)
        except Exception as error:
            log.exception("adapter %s could not be moved to the device", adapter.name)
            found = error
        self._filled.put((number, time.perf_counter() - begun, found))
        self._wake()

    def _settle(self) -> None:
        """Reads the ends of fills."""
        while True:
            try:
                number, seconds, error = self._filled.get_nowait()
            except Empty:
                return
            lodging = self._lodgings[number]
            lodging.ready, lodging.error, lodging.failed_at = True, error, self._clock()
            self.swaps += error is None
            self.swap_seconds += seconds

    def _close_one(self, waiting: bytes) -> None:
        """Closes the open place with the fewest rows for the waiting adapter, unless a place is closed for it."""
        if any(each.closed_for == waiting for each in self._lodgings):
            return
        full = [(each.rows, number) for number, each in enumerate(self._lodgings) if each.rows and not each.closed_for]
        if full:
            self._lodgings[min(full)[1]].closed_for = waiting
