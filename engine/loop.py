"""DeviceThread: the one thread that owns scheduler, slots, caches and model, and the order of one step.

Two steps are in flight: step N+1 is planned and its forward launched before the tokens of step N are read, which reach
N+1 on the device. Planning waits until N is nearly done, so that a request which arrives meanwhile still joins N+1.

    thread  | plan N+1, launch fwd N+1 | collect N, commit N, launch sample N+1, deliver N | gather ... | plan N+2
    stream  | ... fwd N, sample N | fwd N+1 ......................... sample N+1 | fwd N+2

In: the inbox (submit, abort, pause, call, stop; and the step that has just ended, put there by a CPU's stream). Out:
one StepOutput per step to the loop, through the ring of the GIL-free steps, else by call_soon_threadsafe.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from _fast.plan import StepPlan
from engine.config import EngineConfig
from engine.errors import DeviceLostError, for_rows, is_out_of_memory
from engine.failures import FailureCount, TokenBudget
from engine.inbox import Inbox
from engine.output import First, StepOutput, from_ring
from engine.pace import Pace
from engine.request import FinishReason, Request
from engine.runtime import Runtime, load_runtime
from engine.stats import StepStats
from engine.step.result import StepResult

if TYPE_CHECKING:
    from _fast.ring import OutputRing
    from engine.admission import LiveRow
    from engine.steady import SteadySteps

log = logging.getLogger("omniloop.engine")

TIMES = slice(10, None)  # of a step's numbers (OutputRing.pop): schedule, launch, wait, commit, device, gap
LATE = 8  # items from the inbox that are taken behind that moment before a full step is planned without the others


class DeviceThread:
    """Started and stopped by Engine; everything else here runs on the thread itself."""

    def __init__(
        self,
        config: EngineConfig,
        loop: asyncio.AbstractEventLoop,
        ready: asyncio.Future[Any],
        on_output: Callable[[StepOutput], None],
        on_death: Callable[[BaseException], None],
        startup: dict[str, float],
    ) -> None:
        self._config = config
        self._loop = loop
        self._ready = ready
        self._on_output = on_output
        self._on_death = on_death
        self._startup = startup
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._main, name="omniloop-device", daemon=True)
        self._runtime: Runtime | None = None
        self._stopping = False
        self._paused = False  # nothing is planned; what runs keeps its place
        self._refused: list[int] = []
        self._pace: Pace
        self._failures = FailureCount(config.max_failed_steps, config.max_oom)
        self._budget: TokenBudget
        self._restarts: dict[int, LiveRow] = {}  # by slot: rows that start over once no step in flight names them
        self._steady: SteadySteps | None = None
        self._last_beat = 0.0

    # -- called from other threads ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins loading; `ready` is resolved on the loop with (ModelConfig, Limits) or an exception."""
        self._thread.start()

    def submit(self, request: Request, first_id: int) -> None:
        """Adds a request whose choices are numbered from first_id."""
        self._inbox.put(("submit", request, first_id))

    def abort(self, device_id: int) -> None:
        """Ends one choice within a step."""
        self._inbox.put(("abort", device_id))

    def pause(self, paused: bool) -> None:
        """Plans no further step, or goes on."""
        self._inbox.put(("pause", paused))

    def call(self, work: Callable[[Runtime], Any], done: asyncio.Future[Any]) -> None:
        """Runs `work` between two steps; `done` gets what it returns, on the loop."""
        self._inbox.put(("call", work, done))

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the thread after the steps in flight."""
        self._inbox.put(("stop",))
        self._thread.join(timeout)
        if not self._thread.is_alive():  # else it may still look at the inbox's descriptor
            self._inbox.close()

    def lend(self, size: int) -> np.ndarray | None:
        """Memory for a decoded picture, from which the device copies directly."""
        return self._runtime.executor.encoder.lend(size) if self._runtime is not None else None

    @property
    def ring(self) -> OutputRing | None:
        """Where steps' news come from, once ready; None: each is a call on the loop."""
        return self._steady.ring if self._steady is not None else None

    @property
    def last_beat(self) -> float:
        """time.monotonic() of the thread's last turn."""
        return max(self._last_beat, self._steady.last_beat if self._steady is not None else 0.0)

    def ledger(self) -> dict[str, int]:
        """What is held; exact when no step runs."""
        runtime = self._runtime
        if runtime is None:
            return {}
        held = dict(runtime.scheduler.ledger())
        encoder_rows = len(runtime.executor.encoder)
        return held | runtime.admission.ledger() | {"inbox": len(self._inbox), "encoder_rows": encoder_rows}

    # -- the thread -----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        with torch.inference_mode():
            try:
                runtime = self._runtime = load_runtime(self._config, self._startup)
                executor = runtime.executor
                self._pace = Pace(runtime.sizes.max_tokens, executor.tile, executor.fullness)
                self._budget = TokenBudget(runtime.sizes.max_tokens)
                self._steady = runtime.steady(self._inbox)
            except BaseException as error:
                self._tell(_resolve, self._ready, None, error)
                return
            self._tell(_resolve, self._ready, (runtime.model_config, runtime.limits), None)
            try:
                self._run(runtime)
            except BaseException as error:
                log.exception("the device thread ended")
                self._tell(self._on_death, error)
            finally:
                runtime.executor.close()

    def _run(self, runtime: Runtime) -> None:
        previous: StepResult | None = None
        stats = StepStats()
        while True:
            plan = None
            if self._goes_steadily(runtime, previous):
                previous, plan = self._run_steadily(runtime, previous, stats)
            if plan is None:
                self._gather(runtime, previous)
                if self._stopping and previous is None:
                    return
            plan = plan or self._plan(runtime, stats)  # step N+1: numbers
            step = self._launch(runtime, plan, stats) if plan is not None else None  # ... and its forward
            output = None
            if previous is not None:
                output = self._settle(runtime, previous, stats)  # step N: the only wait, then lengths settled
                if self._restarts:
                    self._restage(runtime, step)
            if step is not None:
                self._launch_sample(runtime, step, stats)  # step N+1: what it may say is known now
            if output is not None:
                begun = time.perf_counter()
                self._deliver(runtime, output)
                # Until a step is settled times add up: a turn that settles none counts with the next that is.
                stats = StepStats(commit_s=time.perf_counter() - begun)
            elif self._refused:
                self._deliver(runtime, self._news(runtime))
            previous = step

    def _goes_steadily(self, runtime: Runtime, previous: StepResult | None) -> bool:
        if self._steady is None or self._stopping or self._paused or not runtime.has_work:
            return False
        if self._refused or self._restarts:
            return False
        return self._steady.may_follow(previous)

    def _run_steadily(
        self, runtime: Runtime, previous: StepResult | None, stats: StepStats
    ) -> tuple[StepResult | None, StepPlan | None]:
        """Steps without the GIL; returns the step in flight and, if Python is to launch it, the plan behind it."""
        assert self._steady is not None
        while True:
            left = self._steady.run(previous)
            if left.waited is not None:
                output = self._settle(runtime, left.waited, StepStats())
                of = output.stats
                of.schedule_s, of.launch_s, of.wait_s, _, of.device_s, of.gap_s = left.numbers[TIMES]
                self._deliver(runtime, output)
            elif left.undelivered is not None:
                news: tuple[Any, ...] = (left.numbers, *_columns(left.undelivered), {})
                self._deliver(runtime, from_ring(news, runtime.limits.num_blocks))
            if left.freed and left.waited is None:
                runtime.admission.free_slots()
            previous = left.in_flight
            if left.planned is not None:
                stats.schedule_s += left.numbers[TIMES][0]
            if not left.again or self._refused:
                for rows_bits, seconds in self._steady.learned():
                    self._pace.note_decode(rows_bits, seconds)
                return previous, left.planned

    def _gather(self, runtime: Runtime, previous: StepResult | None) -> None:
        """Takes what the inbox holds, and waits there while there is nothing better to do.

        Once it is time to plan, LATE items more and prompts that fill a step are enough: the device would wait while
        the rest of a crowd is admitted.
        """
        until, late = None, 0
        self._inbox.hush()
        if previous is not None and previous.plan_at:
            until = previous.plan_at
        elif previous is not None:
            seconds = self._pace.expected(previous.plan)
            until = previous.predicted_end(seconds) - min(self._pace.margin, seconds / 2)
        elif runtime.has_work and not self._paused:
            until = 0.0
        while True:
            self._last_beat = time.monotonic()
            wait = 1.0 if until is None else until - time.perf_counter()
            try:
                item = self._inbox.take(wait)
            except Empty:
                if until is None:
                    continue
                return
            if isinstance(item, StepResult):
                if item is previous:  # done earlier than expected: plan at once, after what else has come
                    until = 0.0
                continue
            self._take(runtime, item)
            if until is None and (self._stopping or self._refused or (runtime.has_work and not self._paused)):
                until = 0.0
            late += until is not None and time.perf_counter() >= until
            if late >= LATE and runtime.fills_a_step:
                self._inbox.remind()
                return

    def _take(self, runtime: Runtime, item: tuple[Any, ...]) -> None:
        if item[0] == "submit":
            self._refused += runtime.admission.submit(item[1], item[2])
        elif item[0] == "abort":
            self._refused += runtime.admission.abort(item[1])
        elif item[0] == "pause":
            self._paused = item[1]
        elif item[0] == "call":
            self._answer(item[1], runtime, item[2])
        else:
            self._stopping = True

    def _answer(self, work: Callable[[Runtime], Any], runtime: Runtime, done: asyncio.Future[Any]) -> None:
        """Work asked for from the loop; its fault is the asker's."""
        try:
            self._tell(_resolve, done, work(runtime), None)
        except Exception as error:
            self._tell(_resolve, done, None, error)

    def _plan(self, runtime: Runtime, stats: StepStats) -> StepPlan | None:
        if self._stopping or self._paused:
            return None
        begun = time.perf_counter()
        plan = runtime.next_plan
        runtime.executor.claim(plan)
        shares = runtime.scheduler.shares
        shares.max_tokens = self._budget.of(runtime.scheduler.next_step)
        shares.prompt_budget = self._pace.prompt_budget(*shares.load())
        rows = runtime.scheduler.schedule(plan)
        stats.schedule_s += time.perf_counter() - begun
        return plan if rows else None

    def _launch(self, runtime: Runtime, plan: StepPlan, stats: StepStats) -> StepResult:
        begun = time.perf_counter()
        step = runtime.launch_forward(plan)
        stats.launch_s += time.perf_counter() - begun
        return step

    def _launch_sample(self, runtime: Runtime, step: StepResult, stats: StepStats) -> None:
        begun = time.perf_counter()
        runtime.launch_sample(step, self._inbox.put)
        stats.launch_s += time.perf_counter() - begun

    def _settle(self, runtime: Runtime, step: StepResult, stats: StepStats) -> StepOutput:
        """Waits for a step's tokens, commits them, and writes down what the loop should hear."""
        begun = time.perf_counter()
        if not step.event.wait(self._config.step_timeout):
            raise DeviceLostError(
                f"a step of {step.plan.num_tokens} tokens did not end in {self._config.step_timeout} s"
            )
        waited = time.perf_counter()
        stats.wait_s, stats.by_python = waited - begun, True
        output = StepOutput(stats)
        if step.error is None:
            runtime.executor.collect(step)
        if step.error is not None:
            self._fail(runtime, step, output)
        else:
            self._commit(runtime, step, output)
            if not step.plan_at:  # of the others only the GIL-free loop knows when they began
                took = step.event.fired_at - step.started_at
                self._pace.note(step.plan, took, stats.wait_s, step.began_before)
            self._failures.note_ok()
            stats.device_s, stats.gap_s = step.event.fired_at - step.started_at, step.gap_s
        plan = step.plan
        stats.step_id, stats.num_rows, stats.num_tokens = plan.step_id, plan.num_rows, plan.num_tokens
        stats.num_encodes = plan.num_encodes
        self._note(runtime, stats)
        stats.commit_s += time.perf_counter() - waited
        return output

    def _commit(self, runtime: Runtime, step: StepResult, output: StepOutput) -> None:
        plan, admission = step.plan, runtime.admission
        assert step.tokens is not None
        fresh = self._first_news(runtime, step) if admission.fresh else {}
        override = None
        if step.invalid:
            override = np.zeros(plan.num_rows, np.int32)
            override[list(step.invalid)] = FinishReason.ERROR
            output.invalid = step.invalid
            ended = "step %d ends %d of %d rows: %s"
            log.error(ended, plan.step_id, len(step.invalid), plan.num_rows, next(iter(step.invalid.values())))
        runtime.scheduler.commit(plan, step.tokens, override)
        output.ids, output.tokens, output.finishes = _columns(plan)
        output.stats.num_sampled = plan.num_rows - output.tokens.count(-1)
        output.logprobs = step.logprobs
        admission.free_slots()  # before anything is added: a freed slot is taken again at once
        for row, (slot, news) in fresh.items():
            if output.tokens[row] >= 0 or output.finishes[row]:
                admission.fresh.discard(slot)
                output.firsts[row] = news
                self._refused += admission.release_siblings(output.ids[row])

    def _first_news(self, runtime: Runtime, step: StepResult) -> dict[int, tuple[int, First]]:
        """By row, for those of which the loop has heard nothing yet: slot, and what it is told with the first token."""
        found = {}
        for row, slot in enumerate(step.rows.slots.tolist()):
            if slot not in runtime.admission.fresh:
                continue
            choice = runtime.admission.rows[slot]
            if not choice.started:
                choice.started = step.started_at
            queued = max(0.0, choice.started - choice.request.arrival) if choice.request.arrival else 0.0
            found[row] = (slot, (runtime.scheduler.cached_tokens(slot), queued, choice.prompt_logprobs))
        return found

    def _fail(self, runtime: Runtime, step: StepResult, output: StepOutput) -> None:
        """The step raised: its rows end, everybody else goes on, unless the device itself is what failed.

        Where it was the memory, rows of which nothing has been told start over instead, once.
        """
        plan, admission, error = step.plan, runtime.admission, step.error
        assert error is not None
        log.error("step %d failed (%d rows, %d tokens)", plan.step_id, plan.num_rows, plan.num_tokens, exc_info=error)
        if self._failures.note_failed(error, time.monotonic()):
            raise DeviceLostError(f"step {plan.step_id} failed and the device counts as lost: {error}")
        output.error = for_rows(error)
        output.stats.failed = True
        live = [admission.rows.get(slot) for slot in step.rows.slots.tolist()]
        if is_out_of_memory(error):
            runtime.scheduler.fail(plan, admission.may_restart())
            self._make_room(runtime, error)
        else:
            runtime.scheduler.fail(plan)
        admission.free_slots()
        finishes = np.asarray(plan.out_finish)[: plan.num_rows].tolist()
        for choice, finish in zip(live, finishes):
            if choice is not None and finish != FinishReason.NONE:  # not a row that had ended before
                output.add(choice.device_id, -1, finish)
                self._refused += admission.release_siblings(choice.device_id)

    def _make_room(self, runtime: Runtime, error: BaseException) -> None:
        """After a step that found no room on the device: what it held is given back, and smaller ones follow."""
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the forward
        runtime.executor.free_unused()
        tokens = runtime.scheduler.shares.max_tokens = self._budget.halve(runtime.scheduler.next_step)
        for slot in np.flatnonzero(np.asarray(runtime.scheduler.seqs.void)).tolist():
            row = self._restarts[slot] = runtime.admission.rows[slot]
            row.again = True
        log.warning("%d rows start over; steps have at most %d tokens for a while", len(self._restarts), tokens)

    def _restage(self, runtime: Runtime, in_flight: StepResult | None) -> None:
        """Rows that start over are staged anew, but for those that the step in flight still names."""
        named = set() if in_flight is None else set(in_flight.rows.slots.tolist())
        for slot in [slot for slot in self._restarts if slot not in named]:
            row = self._restarts.pop(slot)
            if runtime.admission.rows.get(slot) is row:  # it may have been left meanwhile
                runtime.admission.restage(slot)

    def _news(self, runtime: Runtime) -> StepOutput:
        """Of no step: there is nothing but what was refused."""
        stats = StepStats()
        self._note(runtime, stats)
        return StepOutput(stats)

    def _note(self, runtime: Runtime, stats: StepStats) -> None:
        scheduler = runtime.scheduler
        stats.running, stats.waiting = scheduler.num_running, scheduler.num_waiting
        stats.blocks_used, stats.blocks_total = scheduler.pool.num_used, runtime.limits.num_blocks
        stats.preemptions = scheduler.num_preemptions
        stats.prefix_queries, stats.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits

    def _deliver(self, runtime: Runtime, output: StepOutput) -> None:
        for device_id in self._refused:
            output.add(device_id, -1, FinishReason.ERROR)
        self._refused.clear()
        if self._steady is not None:
            self._steady.ring.put(output)
        else:
            self._tell(self._on_output, output)

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop has closed: nobody is left to hear it
            log.debug("the event loop is closed; dropped %s", call)


def _columns(plan: StepPlan) -> tuple[list[int], list[int], list[int]]:
    """A committed plan's rows: the requests' numbers, tokens and finishes."""
    columns = (plan.out_request, plan.out_token, plan.out_finish)
    ids, tokens, finishes = (np.asarray(column)[: plan.num_rows].tolist() for column in columns)
    return ids, tokens, finishes


def _resolve(ready: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if ready.done():
        return
    if error is not None:
        ready.set_exception(error)
    else:
        ready.set_result(value)
