"""Group: the ranks of an engine as a model sees them: their exchanges, and the threads that launch on them.

Owner: the device thread, which computes or launches rank 0 itself; a thread of its own serves each other rank. On a
device the ranks' kernels wait for each other, and a launch blocks once about a thousand launches are queued: one thread
that launches a long forward rank after rank would wait forever. HostGroup (host.py) simulates ranks on a CPU,
DeviceGroup (device.py) drives one device for each rank.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.device.host import HostStream
from engine.kernels.step_tensors import SlotTensors, StepInputs
from engine.layers.stream import Exchange

Made = TypeVar("Made")
MOST_SPANS = 100_000  # of a profile: the newest work of all ranks


class Link(Exchange, Protocol):
    """A rank's way to the other ranks. All ranks call the same methods in the same order."""

    def gather(self, logits: Tensor, column: int) -> Tensor:
        """logits [n, tokens of this rank], from token `column` on -> on rank 0 [n, vocab], on other ranks `logits`."""

    def share(self, inputs: StepInputs, slots: SlotTensors) -> None:
        """After a choice: what the next step reads of the rows' slots, above all the newest tokens, becomes rank 0's on
        all ranks."""

    def share_guesses(self, inputs: StepInputs) -> None:
        """After a pass of a drafter, which rank 0 has: the step's drafts become rank 0's on all ranks."""


class Group(ABC):
    """The ranks and their threads. Every method is called by the device thread."""

    links: Sequence[Link]  # by rank

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.error = torch.zeros(1, dtype=torch.int32)  # not 0 after a rank's kernel has waited in vain
        self.spans: deque[tuple[int, float, float]] | None = None  # (rank, begun, ended) of work, while a profile runs
        self._streams: list[HostStream] = []  # of the ranks from rank 1 on; made by the first work

    def run(self, work: Callable[[int], Made]) -> list[Made]:
        """The results of work(rank) on all ranks at once. The first failure is raised once all have ended."""
        done: list[Future[Made]] = [Future() for _ in range(self.ranks)]
        for rank in range(1, self.ranks):
            self._stream(rank).launch(self._run, rank, work, done[rank])
        self._run(0, work, done[0])
        errors = [error for each in done if (error := each.exception()) is not None]
        if errors:
            raise self.renew(errors)
        return [each.result() for each in done]

    def on(self, rank: int, work: Callable[[], Made]) -> Made:
        """The result of work that waits for no other rank, on one rank's thread."""
        if not rank:
            return work()
        done: Future[Made] = Future()
        self._stream(rank).launch(lambda: self._run(rank, lambda _: work(), done))
        return done.result()

    def record_spans(self) -> None:
        """Records the newest work of each rank in `spans`."""
        self.spans = deque(maxlen=MOST_SPANS)

    def close(self) -> None:
        """Ends the threads."""
        for stream in self._streams:
            stream.close()
        self._streams = []

    def copies_of(self, tensor: Tensor) -> list[Tensor]:
        """Rank 0's tensor on every rank."""
        return [tensor] * self.ranks

    @abstractmethod
    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """The ranks' parts [n, width] one after the other, on rank 0."""

    def ready(self) -> None:  # noqa: B027 (simulated ranks always wait for each other)
        """Called at the end of the start. Before, no rank waits for another, so results are useless."""

    def exchange_bytes(self, rank: int) -> int:
        """Bytes of a rank's device in which the sums of all ranks meet."""
        return 0

    def enter(self, rank: int) -> None:  # noqa: B027 (threads on a host need no device)
        """The first call on a rank's own thread."""

    @abstractmethod
    def fail(self) -> None:
        """Ends the waiting of all ranks, if it can, after one has failed; any rank's thread."""

    @abstractmethod
    def renew(self, errors: list[BaseException]) -> BaseException:
        """After failures of some ranks, when no thread waits: the error to raise."""

    def _stream(self, rank: int) -> HostStream:
        while len(self._streams) < rank:
            own = len(self._streams) + 1
            self._streams.append(HostStream(f"omniloop-rank-{own}"))
            self._streams[-1].launch(self.enter, own)
        return self._streams[rank - 1]

    def _run(self, rank: int, work: Callable[[int], Made], done: Future[Made]) -> None:
        begun = time.perf_counter()
        try:
            made = work(rank)
        except BaseException as error:  # else the thread would end, and the other ranks wait without it
            self.fail()
            done.set_exception(error)
            return
        if self.spans is not None:
            self.spans.append((rank, begun, time.perf_counter()))
        done.set_result(made)
