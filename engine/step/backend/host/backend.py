"""HostBackend: steps on the CPU. A HostStream, which is a thread, takes the role of an accelerator's stream.

Owner: device thread; the stream's thread runs the functions that are passed to `run`. In: plans. Out: steps; the stream
puts each finished step into the inbox, so the device thread need not predict the end of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from _fast.plan import StepPlan
from engine.device.host import HostStream
from engine.layers.batch import Batch, LayerHook
from engine.step.backend.base import Abilities, RuledSampler, Steady, StepSampler, T
from engine.step.backend.host.buffers import build
from engine.step.backend.host.forward import HostMasks
from engine.step.backend.host.home import HostEvent
from engine.step.backend.host.slots import HostSlots
from engine.step.backend.states import state_rows
from engine.step.live import LiveRow
from engine.step.rank import Rank
from engine.step.rows import RowArrays
from engine.step.sizes import Sizes
from engine.step.step import Step

PATIENCE = 0.05  # seconds after which a step whose drafts do not come is asked for its error


class Forward(Protocol):
    """Computes a step: from a Batch to the results of its rows."""

    @property
    def sampler(self) -> StepSampler:
        """Samples the tokens."""

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        """Stages a slot."""

    def reset(self, slot: int, poison: bool) -> None:
        """Clears a freed slot."""

    def launch(self, step: Step, rows: RowArrays, batch: Batch) -> None:
        """On the stream: runs the forward; `rows`: the step's rows, with their drafts."""

    def choose(self, step: Step) -> None:
        """On the stream: samples, and fills Step.home."""


class HostBackend:
    """Runs steps on the CPU."""

    can = Abilities(graphs=False, steady_loop=False, tile=16)  # no GIL-free loop: the stream is a Python thread
    steady: Steady | None = None
    scan_variant = 0
    ruled: RuledSampler | None = None
    live_counts: tuple[Tensor, Tensor] | None = None

    def __init__(
        self, rank: Rank, sizes: Sizes, slots: HostSlots, forward: Forward, hooks: Sequence[LayerHook] = ()
    ) -> None:
        self.rank, self.sizes, self.hooks, self.forward_variant, self.drafting_variant = rank, sizes, hooks, 0, 0
        self.slots, self._forward = slots, forward
        self.sampler, self.masks = forward.sampler, HostMasks()
        # Two plans are enough: a plan is written while the previous step runs, after its own last step was settled.
        updates = max(1, sizes.max_rows * rank.layout.token_groups * (sizes.max_blocks + 1))
        runs = rank.layout.runs
        run_width = 0 if runs is None else runs.width
        self.plans = [
            StepPlan(sizes.max_rows, sizes.max_tokens, updates, width=sizes.width, run_width=run_width)
            for _ in range(2)
        ]
        self.states = state_rows(rank.layout, sizes, self.plans[0], rank.num_blocks, "cpu")
        self.stream = HostStream()

    def run(self, call: Callable[..., None], *args: object) -> None:
        self.stream.launch(call, *args)

    def compute(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self.stream.launch(_answer, work, done)
        return done.result()

    def fullness(self, tokens: int) -> float:
        return 1.0

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        self.slots.admit(slot, row.request, row.place)
        self._forward.admit(slot, row, words)

    def send(self, slot: int, words: np.ndarray) -> None:
        """Does nothing: admission has filled the arrays of the host's slots."""

    def reset(self, slot: int, poison: bool) -> None:
        self.slots.reset(slot, poison)
        self._forward.reset(slot, poison)

    def block_table(self, group: int, slot: int) -> Tensor:
        """A view of a freed slot's table; the step in flight does not write the table."""
        return torch.from_numpy(self.slots.block_tables[group, slot])

    def wait_until_read(self, plan: StepPlan) -> None:
        """Does nothing: a plan's step has been settled before the plan is used again."""

    def step(self, plan: StepPlan) -> Step:
        step = Step(plan, RowArrays(plan), HostEvent(), self.run, waits=True)
        if plan.drafting:
            step.notes["drafts"] = Future()
        return step

    def begin(self, step: Step) -> None:
        step.times.started_at = time.perf_counter()

    def forward(self, step: Step) -> None:
        self.slots.apply(step.plan)
        if self.states is not None:
            self.states.read(step.plan, self.slots.tensors)
        rows = step.rows if step.plan.width == 1 else self.slots.resolve(step.rows)
        batch = build(step, rows, self.slots, self.rank, self.states, self.hooks)
        if step.plan.drafting:
            step.notes["drafts"].set_result(self.slots.drafts_of(rows))
        self._forward.launch(step, rows, batch)

    def choose(self, step: Step) -> None:
        self._forward.choose(step)

    def drafts_of(self, step: Step) -> np.ndarray:
        made: Future[np.ndarray] = step.notes["drafts"]
        while True:
            try:
                return made.result(PATIENCE)
            except TimeoutError:
                if step.error is not None:  # the forward failed before the drafts were made
                    raise step.error from None

    def done(self, step: Step, call: Callable[[Step], None]) -> None:
        event = step.event
        assert isinstance(event, HostEvent), "the events of steps here are made here"
        event.fire()
        call(step)

    def collect(self, step: Step, behind: Step | None) -> None:
        """Does nothing: the stream has filled the step."""

    def measure_gaps(self, every: int) -> None:
        """Does nothing: the host's stream has no clock of its own."""

    def free_unused(self) -> None:
        """Does nothing: no memory is cached for reuse."""

    def ledger(self) -> dict[str, int]:
        return {"positions": len(self.slots.positions)}

    def close(self) -> None:
        self.stream.close()
        self.rank.model.close()


def _answer(work: Callable[[], T], done: Future[T]) -> None:
    """Runs `work` on the stream; the caller gets the result or the error through `done`."""
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
