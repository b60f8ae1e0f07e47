"""Executor: runs a step from plan to commit. This file has the plain step; parts implement all other features.

Owner: device thread, which calls the methods of "one step" in their order, with two steps in flight. `_forward` and
`_choose` run on the stream (on an accelerator: launch on the CUDA stream). The hooks of a part (engine/step/parts) are
called only in steps with a row that needs the part; a plain step only checks an empty list.

    plan n+1 | launch n+1: inputs, forward | (wait) collect n, commit n | choose n+1 | plan n+2 ...

A backend that records graphs launches sampling together with the forward, unless a part makes sampling wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from _fast.layout import SLOT_WORDS
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from _fast.steady import SPECIAL_PROMPT
from engine.base.output import StepOutput, columns
from engine.base.request import FinishReason, Request
from engine.base.stats import StepStats
from engine.step.backend.base import Backend
from engine.step.live import LiveRow, Place
from engine.step.parts.part import ABSENT, WAITS, StepPart
from engine.step.rank import Rank
from engine.step.step import Step

WATCHED = 4  # the GIL-free loop can watch so many tokens per slot; after one of them it returns to Python
Part = TypeVar("Part", bound=StepPart)


class Executor:
    """Runs the steps of one model over a backend."""

    def __init__(
        self, ranks: list[Rank], backend: Backend, parts: Sequence[StepPart], wake: Callable[[], None]
    ) -> None:
        """`ranks`: the devices on which the backend launches; `parts`: in the order of engine/step/parts/order; `wake`:
        asks the device thread to check the gates of waiting requests again."""
        self.ranks, self.backend, self.parts, self.wake = ranks, backend, tuple(parts), wake
        slots = backend.sizes.max_slots
        self.special = np.zeros(slots, np.uint8)  # by slot: bits of _fast/steady
        self.watched = np.full((slots, WATCHED), -1, np.int32)
        self._slots: list[set[int]] = [set() for _ in self.parts]  # by part: the slots whose `admit` returned True
        self._active: list[StepPart] = []  # parts that have at least one slot
        self._newest: Step | None = None
        # By hook: the parts that override the hook.
        self._own = {
            hook: [part for part in self.parts if getattr(type(part), hook) is not getattr(StepPart, hook)]
            for hook in ("gate", "place", "free", "gauges")
        }

    def start(self) -> None:
        """Starts the parts, which allocate their memory on the device; the backend must have its buffers."""
        claiming = [part for part in self.parts if part.claim().variants]
        if self.backend.can.graphs:
            self.backend.scan_variant = 1 << len(claiming)
        for number, part in enumerate(claiming):
            part.variant = 1 << number
            self.backend.forward_variant |= part.variant * part.changes_forward
            self.backend.drafting_variant |= part.variant * part.rests
        for part in self.parts:
            part.start(self)

    def allocate(self, blocks: int) -> None:
        """Gives each part the caches of the layers that it claimed, after the KV cache was allocated."""
        counts = [len(part.claim().specs) for part in self.parts]
        caches = iter(self.ranks[0].caches[len(self.ranks[0].caches) - sum(counts) :])
        for part, count in zip(self.parts, counts):
            part.allocate(blocks, list(islice(caches, count)))

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self, scheduler: Scheduler) -> StepPlan | None:
        """Schedules the next step into the record that the device reads; None: no row can be computed."""
        plan = self.next_plan(scheduler)
        self.backend.wait_until_read(plan)
        return plan if scheduler.schedule(plan) else None

    def launch_forward(self, plan: StepPlan) -> Step:
        """Puts inputs and forward of a step onto the stream."""
        step = self._newest = self.backend.step(plan)
        step.variant = plan.variant
        if self._active:
            self._join(step)
        self.backend.run(self._forward, step)
        return step

    def _forward(self, step: Step) -> None:
        """On the stream: runs the parts' `before` and the forward."""
        try:
            self.backend.begin(step)
            for part in step.parts:
                part.before(step)
            self.backend.forward(step)
        except Exception as error:
            step.error = error

    def launch_sample(self, step: Step, done: Callable[[Step], None]) -> None:
        """Puts sampling onto the stream, unless it was launched with the forward. The previous step is settled.

        A backend that learns early that the tokens can be read calls `done`, on any thread.
        """
        if step.chosen:
            return
        try:
            for part in step.parts if step.error is None else ():
                part.between(step)
        except Exception as error:
            step.error = error
        self.backend.run(self._choose, step, done)

    def _choose(self, step: Step, done: Callable[[Step], None]) -> None:
        """On the stream: samples, unless the step has failed, and reports the step as done."""
        if step.error is None:
            try:
                self.backend.choose(step)
            except Exception as error:
                step.error = error
        self.backend.done(step, done)

    def collect(self, step: Step) -> None:
        """Reads the step's tokens after its event has fired; parts may end rows or drop tokens."""
        self.backend.collect(step, self.behind(step))
        if step.error is None:
            for part in step.parts:
                part.collect(step)

    def commit(self, step: Step, scheduler: Scheduler, output: StepOutput) -> Sequence[int]:
        """Appends tokens to their sequences, frees ended rows, and fills the output.

        Returns the index of each plan row in the lists of the output.
        """
        plan, home = step.plan, step.home
        assert home.tokens is not None
        override: np.ndarray | None = None
        if home.invalid or home.finishes:
            override = np.zeros(plan.num_rows, np.int32)
            for row, finish in home.finishes.items():
                override[row] = finish
            override[list(home.invalid)] = FinishReason.ERROR
        scheduler.commit(plan, home.tokens.reshape(-1), override)
        output.ids, output.tokens, output.finishes, places = columns(plan)
        for part in step.parts:
            part.after(step, output, places, scheduler)
        if home.logprobs:
            width, counts = plan.width, plan.out_count
            output.logprobs = {
                places[at // width] + at % width: entry
                for at, entry in home.logprobs.items()
                if at % width < counts[at // width]
            }
        output.invalid = {places[row]: error for row, error in home.invalid.items()}
        for name, values in home.extras.items():
            output.extras[name] = {places[row]: value for row, value in values.items()}
        return places

    # -- which parts are in a step ------------------------------------------------------------------------------------

    def _join(self, step: Step) -> None:
        for part in self._active:
            role = part.role(step)
            if role != ABSENT:
                step.parts.append(part)
                step.waits |= role == WAITS
                step.variant |= part.variant

    def adopt(self, plan: StepPlan) -> Step:
        """Wraps a plan that the GIL-free loop launched in a Step, which Python settles."""
        assert self.backend.steady is not None
        step = self._newest = self.backend.steady.adopt(plan)
        step.variant = plan.variant
        if self._active:
            self._join(step)
        return step

    def behind(self, step: Step) -> Step | None:
        return None if self._newest is step else self._newest

    def next_plan(self, scheduler: Scheduler) -> StepPlan:
        """The plan for the next step; plans are used in turn."""
        plans = self.backend.plans
        return plans[scheduler.next_step % len(plans)]

    # -- requests -----------------------------------------------------------------------------------------------------

    def may_enter(self, request: Request) -> bool:
        """Whether the gates of all parts are open for a request."""
        return all(part.gate(request) for part in self._own["gate"])

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        """Completes a request's Place for the scheduler; an exception refuses the request."""
        for part in self._own["place"]:
            part.place(request, place, scheduler)

    def displace(self, place: Place, scheduler: Scheduler) -> None:
        """Undoes `place` after the request was refused."""
        for part in self.parts:
            part.displace(place, scheduler)

    def admit(self, slot: int, row: LiveRow) -> None:
        """Stages a request in its slot; no step in flight may contain the slot."""
        words = np.zeros(SLOT_WORDS, np.int32)
        self.backend.admit(slot, row, words)
        for part, slots in zip(self.parts, self._slots):
            slots.add(slot)  # before `admit`, so that `reset` also clears the slot if `admit` raises
            if not part.admit(slot, row, words):
                slots.discard(slot)
        self._note_active()
        self.backend.send(slot, words)
        self.mark(slot)

    def mark(self, slot: int) -> None:
        # Python runs prompts, because the output of a first token has extra data (cached tokens, time in the queue).
        bits = SPECIAL_PROMPT
        for part, slots in zip(self.parts, self._slots):
            if slot in slots:
                bits |= part.special(slot)
        self.special[slot] = bits

    def leave(self, slot: int, row: LiveRow, length: int) -> dict[str, object]:
        """Extras, by name, of a traced row whose slot was freed; called before the next plan."""
        found = {part.name: part.leave(slot, row, length) for part in self.parts}
        return {name: value for name, value in found.items() if value is not None}

    def free(self, scheduler: Scheduler) -> None:
        """Runs the parts' `free` after the scheduler has freed slots or media entries."""
        for part in self._own["free"]:
            part.free(scheduler)

    def reset(self, slot: int, poison: bool) -> None:
        """Clears a freed slot; `poison` writes values that no live row may use."""
        self.backend.reset(slot, poison)
        for part, slots in zip(self.parts, self._slots):
            if slot in slots:
                part.reset(slot, poison)
                slots.discard(slot)
        self.watched[slot] = -1
        self._note_active()

    def _note_active(self) -> None:
        self._active = [part for part, slots in zip(self.parts, self._slots) if slots]

    def part(self, kind: type[Part]) -> Part | None:
        """The part of a class, or None if this model and its settings have no such part."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def gauges(self, stats: StepStats) -> None:
        """Adds the parts' numbers to the stats of a settled step."""
        for part in self._own["gauges"]:
            part.gauges(stats)

    def ledger(self) -> dict[str, int]:
        """Counts of resources of requests, zero when idle; on a device also its bytes and the pinned bytes."""
        held = self.backend.ledger()
        for part in self.parts:
            held |= part.ledger()
        return held
