"""DeviceBackend: steps on an accelerator. A plain decode step is one graph.

Owner: device thread, which launches all work on the compute stream. In: plans in pinned records. Out: steps, whose
tokens arrive in a pinned ring. engine/step/backend/device/startup prepares the backend before the first request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from _fast.launcher import Launcher
from _fast.plan import StepPlan
from _fast.ring import OutputRing
from _fast.scheduler import Scheduler
from _fast.steady import SteadyLoop
from engine.base.config import EngineConfig
from engine.device.accelerator import Accelerator
from engine.kernels.target import target
from engine.kernels.tune import fullness
from engine.parallel.model import SplitModel
from engine.step.backend.base import Abilities, Masks, RuledSampler, Steady, StepSampler, T
from engine.step.backend.device.buffers import StepBuffers
from engine.step.backend.device.forwards import Forwards
from engine.step.backend.device.home import TokensHome
from engine.step.live import LiveRow
from engine.step.rank import Rank
from engine.step.rows import RowArrays
from engine.step.sizes import Sizes
from engine.step.step import Step

TILE = 128  # rows of a product's matrix tile, on every supported card


class Forward(Protocol):
    """Computes a step: from the inputs to the results on the host. Launches are recorded as graphs at start."""

    launcher: Launcher
    all: Forwards

    @property
    def sampler(self) -> StepSampler:
        """Samples the tokens."""

    @property
    def ruled(self) -> RuledSampler | None:
        """The same sampler if it has rules on the device, else None."""

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        """Stages a slot; may change the slot's words."""

    def reset(self, slot: int, poison: bool) -> None:
        """Clears a freed slot."""

    def kind_of(self, step: Step) -> int:
        """The kind of graph that can run the step's forward (GraphKind)."""

    def launch(self, step: Step, kind: int, size: int) -> None:
        """Launches the forward, and sampling unless it has to wait; `size`: tokens of the graph, 0: no graph."""

    def choose(self, step: Step) -> None:
        """Launches the sampling of a step whose sampling had to wait."""

    def collect(self, step: Step) -> None:
        """Fills Step.home."""


class DeviceBackend:
    """Runs steps on one accelerator, or on one for each rank."""

    def __init__(
        self, config: EngineConfig, rank: Rank, sizes: Sizes, buffers: StepBuffers, forward: Forward, masks: Masks
    ) -> None:
        assert rank.accelerator is not None
        self.config, self.rank, self.sizes, self.buffers = config, rank, sizes, buffers
        self.accelerator: Accelerator = rank.accelerator
        self.launcher = self.accelerator.launcher(buffers.records.pinned, buffers.records.turn, buffers.home.ring)
        following = forward.all.following
        for each in following:
            each.buffers.accelerator.add_to(self.launcher, each.buffers.records.turn)
        if isinstance(rank.model, SplitModel):
            self.launcher.watch(rank.model.group.error.data_ptr())
            self.accelerator.bind()
        self._overlaid = forward.all.overlaid if following else buffers.overlaid
        self.forwards, forward.launcher = forward, self.launcher
        self.sampler, self.masks, self.plans = forward.sampler, masks, buffers.plans
        self.ruled, self.hooks = forward.ruled, buffers.hooks
        self.live_counts: tuple[Tensor, Tensor] | None = buffers.inputs.query_start[-1:], buffers.inputs.num_sampled
        self.steady: Steady | None = None

    @property
    def forward_variant(self) -> int:
        """See Backend."""
        return self.buffers.variants.forward

    @forward_variant.setter
    def forward_variant(self, bit: int) -> None:
        self.buffers.variants.forward = bit

    @property
    def drafting_variant(self) -> int:
        """See Backend."""
        return self.buffers.variants.drafting

    @drafting_variant.setter
    def drafting_variant(self, bit: int) -> None:
        self.buffers.variants.drafting = bit

    @property
    def scan_variant(self) -> int:
        """See Backend."""
        return self.buffers.variants.scan

    @scan_variant.setter
    def scan_variant(self, bit: int) -> None:
        self.buffers.variants.scan = bit if self.buffers.verifies_states else 0

    @property
    def can(self) -> Abilities:
        return Abilities(graphs=True, steady_loop=self.steady is not None, tile=TILE)

    def run(self, call: Callable[..., None], *args: object) -> None:
        call(*args)  # this thread launches on the stream

    def compute(self, work: Callable[[], T]) -> T:
        return work()

    def fullness(self, tokens: int) -> float:
        text = self.rank.own.config.text
        # With --deterministic the number of tiles does not change the fullness. With experts the fullness depends on
        # the routing of the tokens, not on their number.
        if self.config.deterministic or text.routings:
            return 1.0
        return fullness(target(), tokens, text.intermediate_size, text.hidden_size)

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        self.buffers.slots.admit(slot, row, words)
        self.forwards.admit(slot, row, words)

    def send(self, slot: int, words: np.ndarray) -> None:
        self.buffers.slots.params.stage(slot, words)

    def reset(self, slot: int, poison: bool) -> None:
        self.buffers.slots.reset(slot, poison)
        self.forwards.reset(slot, poison)

    def block_table(self, group: int, slot: int) -> Tensor:
        return self.buffers.slots.tensors.block_tables[group, slot]

    def wait_until_read(self, plan: StepPlan) -> None:
        self.launcher.wait_until_read(plan.number)

    def step(self, plan: StepPlan) -> Step:
        return Step(plan, RowArrays(plan), TokensHome(self.launcher, plan.number), self.run)

    def begin(self, step: Step) -> None:
        """Does nothing: the launcher reads the device's own times."""

    def forward(self, step: Step) -> None:
        kind = self.forwards.kind_of(step)
        size = 0 if step.eager else self.launcher.pick(kind, step.plan.num_tokens, step.variant)
        if not size:
            step.times.is_a_guess()
        self.buffers.slots.pack(step.plan, step.rows)
        with self._overlaid(step.media if size else []):
            self.forwards.launch(step, kind, size)
        if step.chosen:
            self._asked(step)

    def choose(self, step: Step) -> None:
        self.forwards.choose(step)
        self._asked(step)

    def _asked(self, step: Step) -> None:
        """Marks a step whose work is all launched: its tokens will arrive in the ring."""
        assert isinstance(step.event, TokensHome), "the events of steps here are made here"
        step.event.asked = True

    def drafts_of(self, step: Step) -> np.ndarray:
        return self.buffers.home.drafts_of(step.number, step.rows.sampled, self.config.step_timeout)

    def done(self, step: Step, call: Callable[[Step], None]) -> None:
        """Does nothing: the launcher finds out when the tokens have arrived."""

    def collect(self, step: Step, behind: Step | None) -> None:
        times = step.times
        times.started_at = max(times.started_at, times.launched_at)
        if behind is not None:
            behind.times.started_at = step.event.fired_at  # the device starts the next step at once
            behind.times.began_before = step.event.found_done
        if step.error is None:
            times.gap_s = self.launcher.gap_s
            self.forwards.collect(step)

    def measure_gaps(self, every: int) -> None:
        """Measures the device's idle time after one step in `every` (StepStats.gap_s)."""
        self.launcher.measure_gaps(every)

    def free_unused(self) -> None:
        self.accelerator.free_unused()

    def ledger(self) -> dict[str, int]:
        return {"positions": len(self.buffers.slots.positions)} | self.accelerator.ledger()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a lost device raises
            self.accelerator.close()
        self.rank.model.close()


class DeviceSteady:
    """The GIL-free loop over a backend's plans and graphs."""

    def __init__(self, backend: DeviceBackend, logprobs_asked: np.ndarray, logprob_lines: Tensor) -> None:
        """`logprob_lines`: int32 [records, max_rows, tokens of a row in a step, words]."""
        self._backend = backend
        self.logprobs_asked, self.logprob_lines = logprobs_asked, logprob_lines

    def loop(
        self, scheduler: Scheduler, ring: OutputRing, special: np.ndarray, watched: np.ndarray, wake_fd: int
    ) -> SteadyLoop:
        """See Steady."""
        backend = self._backend
        params, launcher = backend.buffers.slots.params, backend.launcher
        return SteadyLoop(scheduler, backend.plans, params, launcher, ring, special, watched, wake_fd)

    def adopt(self, plan: StepPlan) -> Step:
        """See Steady."""
        launcher = self._backend.launcher
        step = Step(plan, RowArrays(plan), TokensHome(launcher, plan.number, True), self._backend.run, chosen=True)
        step.times.launched_at = launcher.launched_at_of(plan.number)
        step.times.started_at = max(step.times.launched_at, launcher.ended_at)
        return step
