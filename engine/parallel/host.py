"""HostGroup: ranks that share a CPU, for tests of everything that surrounds the device's kernels.

Owner: the thread of a rank. The ranks meet at a barrier, then each sums all partials in rank order, as the kernels do
(engine/kernels/parallel). Partials lie in two places that are used in turn, so a meeting needs one barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.parallel.exchange import exchange_reference
from engine.kernels.parallel.tokens import sent_guesses, sent_slots, take_guesses_reference, take_slots_reference
from engine.kernels.step_tensors import SlotTensors, StepInputs
from engine.layers.norm import Normed, RMSNorm
from engine.parallel.group import Group

PATIENCE = 120.0  # seconds; then the step fails on all ranks


class Meeting:
    """The place where the ranks' partials lie."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self._partials: list[list[Tensor | None]] = [[None] * ranks for _ in range(2)]

    def met(self, turn: int, rank: int, partial: Tensor) -> list[Tensor]:
        """Waits for all ranks' partials. Raises BrokenBarrierError if a rank has failed."""
        place = self._partials[turn]
        place[rank] = partial
        self._barrier.wait(PATIENCE)
        return [each for each in place if each is not None]

    def fail(self) -> None:
        """Ends the waiting of all ranks, after one has failed."""
        self._barrier.abort()

    def renew(self) -> None:
        """After a failed step, when no rank waits."""
        self._barrier.reset()


class HostExchange:
    """A rank's Link."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self._turn = meeting, rank, 0

    def renew(self) -> None:
        """After a failed step, whose exchanges not all ranks have counted."""
        self._turn = 0

    def total(self, partial: Tensor) -> Tensor:
        return exchange_reference(self._met(partial))

    def add_to(self, residual: Tensor, partial: Tensor) -> None:
        exchange_reference(self._met(partial), residual)

    def add_then(self, residual: Tensor, partial: Tensor, norm: RMSNorm) -> Normed:
        self.add_to(residual, partial)
        return Normed(norm, residual)

    def gather(self, logits: Tensor, column: int) -> Tensor:
        parts = self._met(logits)
        return logits if self.rank else torch.cat(parts, -1)

    def share(self, inputs: StepInputs, slots: SlotTensors) -> None:
        sent = self._met(sent_slots(inputs, slots))[0]
        if self.rank:
            take_slots_reference(sent, inputs, slots)

    def share_guesses(self, inputs: StepInputs) -> None:
        sent = self._met(sent_guesses(inputs))[0]
        if self.rank:
            take_guesses_reference(sent, inputs)

    def _met(self, partial: Tensor) -> list[Tensor]:
        self._turn = 1 - self._turn
        return self._meeting.met(self._turn, self.rank, partial)


class HostGroup(Group):
    """Ranks on threads of this process."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._meeting = Meeting(ranks)
        self._exchanges = [HostExchange(self._meeting, rank) for rank in range(ranks)]
        self.links = self._exchanges

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), -1)

    def fail(self) -> None:
        self._meeting.fail()

    def renew(self, errors: list[BaseException]) -> BaseException:
        self._meeting.renew()
        for exchange in self._exchanges:
            exchange.renew()
        return next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
