"""Settler: waits for a step's tokens, commits them, and makes the step's output for the event loop.

Owner: device thread. In: the oldest Step in flight. Out: a StepOutput. Settling also frees slots, admits the waiting
siblings of first choices, and reports times to Pace. A failed step ends its rows; if the device ran out of memory, rows
without a delivered token start over instead.
"""

from __future__ import annotations

import logging
import time
import traceback
from typing import TYPE_CHECKING

import numpy as np

from engine.base.errors import DeviceLostError, for_rows, is_out_of_memory
from engine.base.failures import FailureCount, TokenBudget
from engine.base.output import First, StepOutput, drafted_of
from engine.base.request import FinishReason
from engine.base.stats import DraftCounts, SettledBy, StateCounts, StepStats
from engine.run.acceptance import AcceptanceWatch
from engine.step.live import LiveRow
from engine.step.step import Step

if TYPE_CHECKING:
    from engine.run.pace import Pace
    from engine.run.runtime import Runtime

log = logging.getLogger("omniloop.engine")


class Settler:
    """Settles the steps of one runtime in the order in which they were launched."""

    def __init__(self, runtime: Runtime, pace: Pace, budget: TokenBudget) -> None:
        config = runtime.config
        self._runtime, self._pace, self._budget = runtime, pace, budget
        self._timeout = config.step_timeout
        self._failures = FailureCount(config.failures.steps, config.failures.oom)
        self._acceptance = AcceptanceWatch()
        self.restarts: dict[int, LiveRow] = {}  # by slot: rows that start over once no step in flight contains them

    def settle(self, step: Step, stats: StepStats) -> StepOutput:
        """Waits for the tokens of a step and commits them. Raises DeviceLostError.

        A late step is only logged. The watcher (Engine) handles a step that never ends.
        """
        begun = time.perf_counter()
        while not step.event.wait(self._timeout):
            log.warning("a step of %d tokens has not ended in %g s", step.plan.num_tokens, time.perf_counter() - begun)
        waited = time.perf_counter()
        stats.wait_s, stats.settled = waited - begun, SettledBy.PYTHON
        times = step.times
        stats.launched_at, stats.ended_at, stats.waited_at = times.launched_at, step.event.fired_at, waited
        output = StepOutput(stats)
        if step.error is None:
            try:
                self._runtime.executor.collect(step)
            except Exception as error:
                step.error = error
        if step.error is not None:
            self._fail(step, output)
        else:
            self._commit(step, output)
            took = step.event.fired_at - times.started_at
            if not times.plan_at:  # otherwise only the GIL-free loop knows when the step began
                self._pace.note(step.plan, took, stats.wait_s, times.began_before)
            self._failures.note_ok()
            stats.device_s, stats.gap_s = took, times.gap_s
        plan = step.plan
        stats.step_id, stats.num_rows, stats.num_tokens = plan.step_id, plan.num_rows, plan.num_tokens
        stats.num_encodes = plan.num_encodes
        self._read_gauges(stats)
        stats.commit_s += time.perf_counter() - waited
        return output

    def empty_output(self) -> StepOutput:
        """An output without a step: only refused requests."""
        stats = StepStats()
        self._read_gauges(stats)
        return StepOutput(stats)

    def restage(self, in_flight: Step | None) -> None:
        """Stages rows that start over, except rows that the step in flight still contains."""
        named = set() if in_flight is None else set(in_flight.rows.slots.tolist())
        for slot in [slot for slot in self.restarts if slot not in named]:
            row = self.restarts.pop(slot)
            if self._runtime.admission.rows.get(slot) is row:  # the request may have left meanwhile
                self._runtime.admission.restage(slot)

    def _commit(self, step: Step, output: StepOutput) -> None:
        plan, admission, home = step.plan, self._runtime.admission, step.home
        fresh = self._first_news(step) if admission.fresh else {}
        if home.invalid:
            ended = "step %d ends %d of %d rows: %s"
            log.error(ended, plan.step_id, len(home.invalid), plan.num_rows, next(iter(home.invalid.values())))
        places = self._runtime.executor.commit(step, self._runtime.scheduler, output)
        output.stats.num_sampled = len(output.tokens) - output.tokens.count(-1)
        output.drafted = drafted_of(plan) if self._runtime.config.report_drafts else ()
        admission.free_slots()  # before any admission: an admission may take a freed slot at once
        begun = [row for row in fresh if output.has_news(places[row])]
        for row in begun:
            slot, output.firsts[places[row]] = fresh[row]
            admission.fresh.discard(slot)
        # After all `fresh` marks are removed, because a sibling may take a slot that this step has freed.
        for row in begun if admission.siblings else ():
            admission.release_siblings(output.ids[places[row]])

    def _first_news(self, step: Step) -> dict[int, tuple[int, First]]:
        """By row, for choices without a delivered token: the slot, and (cached tokens, seconds in the queue)."""
        runtime, found = self._runtime, {}
        for row, slot in enumerate(step.rows.slots.tolist()):
            if slot not in runtime.admission.fresh:
                continue
            choice = runtime.admission.rows[slot]
            if not choice.started:
                choice.started = step.times.started_at
            queued = max(0.0, choice.started - choice.request.arrival) if choice.request.arrival else 0.0
            found[row] = (slot, (runtime.scheduler.cached_tokens(slot), queued))
        return found

    def _fail(self, step: Step, output: StepOutput) -> None:
        """Ends the rows of a failed step; other rows continue. Raises DeviceLostError if the device failed.

        If the device ran out of memory, rows without a delivered token start over instead, at most once.
        """
        plan, error = step.plan, step.error
        scheduler, admission = self._runtime.scheduler, self._runtime.admission
        assert error is not None
        log.error("step %d failed (%d rows, %d tokens)", plan.step_id, plan.num_rows, plan.num_tokens, exc_info=error)
        if self._failures.note_failed(error, time.monotonic()):
            raise DeviceLostError(f"step {plan.step_id} failed and the device counts as lost: {error}")
        output.error = for_rows(error)
        output.stats.settled = SettledBy.FAILED
        live = [admission.rows.get(slot) for slot in step.rows.slots.tolist()]
        if is_out_of_memory(error):
            scheduler.fail(plan, admission.may_restart())
            self._make_room(error)
        else:
            scheduler.fail(plan)
        admission.free_slots()
        finishes = np.asarray(plan.out_finish)[: plan.num_rows].tolist()
        for choice, finish in zip(live, finishes):
            if choice is not None and finish != FinishReason.NONE:  # NONE: the row had ended before
                output.add(choice.device_id, -1, finish)
                admission.release_siblings(choice.device_id)

    def _make_room(self, error: BaseException) -> None:
        """After a step that ran out of device memory: frees the step's memory and halves the size of the next steps."""
        runtime = self._runtime
        traceback.clear_frames(error.__traceback__)  # frames hold the tensors of the forward
        runtime.executor.backend.free_unused()
        tokens = runtime.scheduler.shares.max_tokens = self._budget.halve(runtime.scheduler.next_step)
        for slot in runtime.scheduler.seqs.restarting():
            row = self.restarts[slot] = runtime.admission.rows[slot]
            row.again = True
        log.warning("%d rows start over; steps have at most %d tokens for a while", len(self.restarts), tokens)

    def _read_gauges(self, stats: StepStats) -> None:
        scheduler = self._runtime.scheduler
        stats.running, stats.waiting = scheduler.num_running, scheduler.num_waiting
        stats.blocks_used, stats.blocks_total = scheduler.pool.num_used, self._runtime.limits.num_blocks
        stats.preemptions = scheduler.num_preemptions
        stats.prefix_queries, stats.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
        if (states := scheduler.state_counts) is not None:
            stats.states = StateCounts(**states)
        if self._runtime.sizes.width > 1:
            stats.drafts = DraftCounts(*scheduler.drafts.counts)
            self._acceptance.look(stats.drafts)
        self._runtime.executor.gauges(stats)
