"""The progress part: after each step, how many tokens of a prompt are computed.

Owner: device thread. In: steps with rows whose requests want reports. Out: an extra with a Progress. Steps with tokens
of a prompt run in Python anyway, so reports change no other step. If a row is preempted after its prompt was computed,
the second computation is not reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from _fast.scheduler import Scheduler
from engine.base.output import StepOutput
from engine.base.request import Progress
from engine.step.live import LiveRow
from engine.step.parts.part import ABSENT, JOINS, StepPart
from engine.step.step import Step


class PromptProgress(StepPart):
    """Stores by slot the prompt's length and the time at which its first step started."""

    name = "progress"

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, float]] = {}  # slot -> (tokens of the prompt, start in seconds; 0: none yet)
        self._admitted: set[int] = set()

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        if not row.request.sampling.return_progress or row.choice > 0:
            return False
        self._open[slot] = (len(row.request.prompt_token_ids), 0.0)
        self._admitted.add(slot)
        return True

    def reset(self, slot: int, poison: bool) -> None:
        self._open.pop(slot, None)
        self._admitted.discard(slot)

    def role(self, step: Step) -> int:
        return JOINS if self._open and not self._open.keys().isdisjoint(step.rows.slots.tolist()) else ABSENT

    def after(self, step: Step, output: StepOutput, places: Sequence[int], scheduler: Scheduler) -> None:
        """Adds a Progress to the output of each row whose prompt has grown."""
        rows = step.rows
        for row, slot in enumerate(rows.slots.tolist()):
            if slot not in self._open:
                continue
            total, started = self._open[slot]
            started = started or step.times.started_at
            done = min(int(rows.computed[row]) + int(rows.lens[row]), total)
            took = max(0.0, step.event.fired_at - started)
            step.home.extra(self.name, row, Progress(total, scheduler.cached_tokens(slot), done, took))
            if done == total:
                del self._open[slot]
            else:
                self._open[slot] = (total, started)

    def ledger(self) -> dict[str, int]:
        return {self.name: len(self._admitted)}
