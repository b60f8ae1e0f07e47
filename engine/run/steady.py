"""SteadySteps: gives steps that only decode plain rows to the GIL-free loop, and returns to Python what needs Python.

Owner: device thread; the event loop reads the ring. In: the step in flight. Out: a Handover with the state in which the
GIL-free loop stopped. A row is plain if it is past its prompt and not special (engine/sampling/device). Python launches
all steps with other rows, and each step after a request has arrived or ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from _fast.plan import StepPlan
from _fast.ring import OutputRing, logprobs_of_words
from _fast.scheduler import Scheduler
from _fast.steady import REASON_FREED, REASON_INVALID, REASON_PREEMPTED, REASON_RING, REASON_WOKEN
from _fast.step_numbers import StepNumbers
from engine.base.output import columns
from engine.step.plain import Executor
from engine.step.step import Step

# After these reasons Python handles the event, and the GIL-free loop continues.
RESUMABLE = (REASON_FREED, REASON_RING, REASON_INVALID, REASON_PREEMPTED, REASON_WOKEN)


@dataclass(slots=True)
class Handover:
    """Steps that the GIL-free loop returns to Python. Python handles the fields in this order."""

    uncommitted: Step | None  # tokens are on the host; a sampled row has no valid token, or a part watches for a token
    unpublished: StepPlan | None  # committed, but the ring was full
    numbers: StepNumbers  # of the step in `uncommitted` or `unpublished`; also the seconds for scheduling `planned`
    freed: bool  # True: the scheduler has freed slots or media entries
    in_flight: Step | None  # the newest launched step
    planned: StepPlan | None  # scheduled after `in_flight` and not plain: Python has to launch it
    may_resume: bool  # the GIL-free loop can continue after Python has handled the fields above
    # Log-probabilities of the unpublished plan's rows, in the form that the ring has.
    logprobs: dict[int, tuple[Any, ...]] = field(default_factory=dict)


class SteadySteps:
    """The GIL-free loop of one runtime."""

    def __init__(self, executor: Executor, scheduler: Scheduler, wake_fd: int, report_drafts: bool) -> None:
        steady = executor.backend.steady
        assert steady is not None, "only backends that declare a steady loop have one"
        self._asked, self._lines = steady.logprobs_asked, steady.logprob_lines
        self.ring = OutputRing(
            scheduler.max_rows,
            asked=self._asked,
            lines=self._lines.numpy(),
            width=executor.backend.sizes.width,
            lists_drafted=report_drafts,
        )
        self._executor = executor
        self._loop = steady.loop(scheduler, self.ring, executor.special, executor.watched, wake_fd)

    @property
    def last_beat(self) -> float:
        """time.monotonic() of the loop's last iteration."""
        return self._loop.last_beat

    def learned(self) -> list[tuple[int, float]]:
        """(bit length of the number of rows, seconds) of decode-only steps, for all sizes that have run."""
        return self._loop.learned()

    def may_follow(self, previous: Step | None) -> bool:
        """Whether the GIL-free loop can continue after a step that Python launched and that is in flight."""
        if previous is None:
            return True
        return previous.chosen and previous.error is None and self._loop.is_plain(previous.plan)

    def run(self, previous: Step | None) -> Handover:
        """Runs plain steps until an event needs Python. Raises RuntimeError if the device is lost."""
        loop, executor = self._loop, self._executor
        reason = loop.run(-1 if previous is None else previous.number)
        plans = executor.backend.plans
        uncommitted = executor.adopt(plans[loop.uncommitted]) if loop.uncommitted >= 0 else None
        in_flight = None
        if loop.in_flight >= 0:
            in_flight = executor.adopt(plans[loop.in_flight])
            in_flight.times.plan_at = loop.plan_until(loop.in_flight)
        return Handover(
            uncommitted=uncommitted,
            unpublished=plans[loop.unpublished] if loop.unpublished >= 0 else None,
            logprobs=self._logprobs(plans[loop.unpublished]) if loop.unpublished >= 0 else {},
            numbers=loop.numbers,
            freed=loop.freed,
            in_flight=in_flight,
            planned=plans[loop.planned] if loop.planned >= 0 else None,
            may_resume=reason in RESUMABLE,
        )

    @property
    def num_steps(self) -> int:
        """The number of steps that ran without the GIL."""
        return self._loop.num_steps

    def _logprobs(self, plan: StepPlan) -> dict[int, tuple[Any, ...]]:
        """Log-probabilities of the new tokens of a committed plan, by place in the output."""
        asked = self._asked[np.asarray(plan.row_slot)[: plan.num_rows]]
        counts = np.minimum(np.asarray(plan.out_count)[: plan.num_rows], self._lines.shape[2])
        lines = self._lines[plan.number].numpy()
        places = columns(plan)[3]
        return {
            places[row] + k: logprobs_of_words(lines[row, k], int(asked[row]) - 1)
            for row in np.flatnonzero(asked).tolist()
            for k in range(int(counts[row]))
        }
