"""Executor: one step from plan to commit. The plain step is here, top to bottom; what else a row asks for is a part.

Owner: device thread, which calls the methods below in this order for every step, two steps in flight; `_forward` and
`_choose` run on the stream, which on an accelerator is the driver's. A part (engine/step/parts) is asked only in steps
that have a row of its own, so a plain step costs one look at an empty list.

    plan n+1 | launch n+1: inputs, forward | (wait) collect n, commit n | choose n+1 | plan n+2 ...

A backend that records graphs launches the choice of a step with its forward where no part wants it to wait.
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
from engine.base.faults import Faults
from engine.base.output import StepOutput, columns
from engine.base.request import Request
from engine.base.stats import StepStats
from engine.step.backend.base import Backend
from engine.step.live import LiveRow, Place
from engine.step.parts.part import ABSENT, WAITS, StepPart
from engine.step.rank import Rank
from engine.step.step import Step

WATCHED = 4  # tokens of a slot behind which the GIL-free loop asks Python without Python looking at each
Part = TypeVar("Part", bound=StepPart)


class Executor:
    """Runs the steps of one model over a backend."""

    def __init__(
        self, ranks: list[Rank], backend: Backend, parts: Sequence[StepPart], wake: Callable[[], None]
    ) -> None:
        """`ranks`: the devices, of which the backend launches on; `parts` in the order of engine/step/parts/order;
        `wake` has the device thread look again at what waits at gates."""
        self.ranks, self.backend, self.parts, self.wake = ranks, backend, tuple(parts), wake
        self.faults = Faults()  # none is armed, unless the configuration brings others
        slots = backend.sizes.max_slots
        self.special = np.zeros(slots, np.uint8)  # by slot: bits of _fast/steady
        self.watched = np.full((slots, WATCHED), -1, np.int32)
        self._slots: list[set[int]] = [set() for _ in self.parts]  # by part: its slots
        self._active: list[StepPart] = []  # parts that have a slot
        self._newest: Step | None = None
        # By hook: the parts that have one of their own.
        self._own = {
            hook: [part for part in self.parts if getattr(type(part), hook) is not getattr(StepPart, hook)]
            for hook in ("gate", "place", "free", "gauges")
        }

    def start(self) -> None:
        """The backend has its buffers: parts make what is theirs on the device."""
        for number, part in enumerate(part for part in self.parts if part.claim().variants):
            part.variant = 1 << number
        for part in self.parts:
            part.start(self)

    def allocate(self, blocks: int) -> None:
        """The KV cache has so many blocks: parts get the caches of the layers that they claimed, behind the model's."""
        counts = [len(part.claim().specs) for part in self.parts]
        caches = iter(self.ranks[0].caches[len(self.ranks[0].caches) - sum(counts) :])
        for part, count in zip(self.parts, counts):
            part.allocate(blocks, list(islice(caches, count)))

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self, scheduler: Scheduler) -> StepPlan | None:
        """Numbers of the next step, written into the record that the device reads; None: no row can be computed."""
        plan = self.next_plan(scheduler)
        self.backend.wait_until_read(plan)
        return plan if scheduler.schedule(plan) else None

    def launch_forward(self, plan: StepPlan) -> Step:
        """Inputs and forward go onto the stream."""
        step = self._newest = self.backend.step(plan)
        if self._active:
            self._join(step)
        self.backend.run(self._forward, step)
        return step

    def _forward(self, step: Step) -> None:
        """On the stream."""
        try:
            self.backend.begin(step)
            self.faults.at("inputs", step)
            for part in step.parts:
                part.before(step)
            self.backend.forward(step)
            self.faults.at("forward", step)
        except Exception as error:
            step.error = error

    def launch_sample(self, step: Step, done: Callable[[Step], None]) -> None:
        """The choice of tokens goes onto the stream, unless it went with the forward; the step before is settled.

        `done` is called, on any thread, where the backend knows early that the tokens can be read.
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
        """On the stream. A step that failed has nothing to choose, and is done."""
        if step.error is None:
            try:
                self.faults.at("sampling", step)
                self.backend.choose(step)
            except Exception as error:
                step.error = error
        self.backend.done(step, done)

    def collect(self, step: Step) -> None:
        """The step's event has fired: its tokens come home, parts may end rows or drop tokens. What raises fails it."""
        try:
            self.faults.at("home", step)
            self.backend.collect(step, self.behind(step))
            for part in step.parts if step.error is None else ():
                part.collect(step)
            self.faults.at("commit", step)
        except Exception as error:
            step.error = error

    def commit(self, step: Step, scheduler: Scheduler, output: StepOutput) -> Sequence[int]:
        """Tokens join their sequences, lengths are settled, ended rows freed; the output gets the step's news.

        Returns the place of each plan row in the lists of the output.
        """
        plan, home = step.plan, step.home
        assert home.tokens is not None
        scheduler.commit(plan, home.tokens.reshape(-1), home.ends())
        output.ids, output.tokens, output.finishes, places = columns(plan)
        for part in step.parts:
            part.after(step, output, places, scheduler)
        home.report(output, places)
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
        """A plain step that the GIL-free loop launched, as Python settles it."""
        assert self.backend.steady is not None
        step = self._newest = self.backend.steady.adopt(plan)
        if self._active:
            self._join(step)
        return step

    def behind(self, step: Step) -> Step | None:
        return None if self._newest is step else self._newest

    def next_plan(self, scheduler: Scheduler) -> StepPlan:
        """Where the next step is planned: records are taken in turn."""
        plans = self.backend.plans
        return plans[scheduler.next_step % len(plans)]

    # -- requests -----------------------------------------------------------------------------------------------------

    def may_enter(self, request: Request) -> bool:
        """Whether every part lets a request into the scheduler now."""
        return all(part.gate(request) for part in self._own["gate"])

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        """Completes how the scheduler knows a request; what raises refuses it."""
        for part in self._own["place"]:
            part.place(request, place, scheduler)

    def displace(self, place: Place, scheduler: Scheduler) -> None:
        """The request was refused: parts take back what `place` took."""
        for part in self.parts:
            part.displace(place, scheduler)

    def admit(self, slot: int, row: LiveRow) -> None:
        """Stages a request's row, which no step in flight knows."""
        words = np.zeros(SLOT_WORDS, np.int32)
        self.backend.admit(slot, row, words)
        for part, slots in zip(self.parts, self._slots):
            slots.add(slot)  # first: what an admission that raises has staged is reset, too
            if not part.admit(slot, row, words):
                slots.discard(slot)
        self._note_active()
        self.backend.send(slot, words)
        self.mark(slot)

    def mark(self, slot: int) -> None:
        # Prompts are Python's: the first token comes with what the prompt's arrival has to report.
        bits = SPECIAL_PROMPT
        for part, slots in zip(self.parts, self._slots):
            if slot in slots:
                bits |= part.special(slot)
        self.special[slot] = bits

    def leave(self, slot: int, row: LiveRow, length: int) -> dict[str, object]:
        """Extras of a traced row whose slot has come back, by name; before the next plan."""
        found = {part.name: part.leave(slot, row, length) for part in self.parts}
        return {name: value for name, value in found.items() if value is not None}

    def free(self, scheduler: Scheduler) -> None:
        """Slots or entries came back from the scheduler."""
        for part in self._own["free"]:
            part.free(scheduler)

    def reset(self, slot: int, poison: bool) -> None:
        """Forgets a freed slot; with `poison` its numbers become ones that no live row may use."""
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
        """The part of a kind, if this model and these settings have one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def gauges(self, stats: StepStats) -> None:
        """Completes the numbers of a settled step."""
        for part in self._own["gauges"]:
            part.gauges(stats)

    def ledger(self) -> dict[str, int]:
        """What is held per request; zero when idle. Where there is a device, its bytes and pinned ones too."""
        held = self.backend.ledger()
        for part in self.parts:
            held |= part.ledger()
        return held
