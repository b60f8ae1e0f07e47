"""DeviceThread: the only thread that owns scheduler, slots, caches and model. It runs the steps.

Two steps are in flight: step N+1 is planned and its forward is launched before the host reads the tokens of step N.
Step N+1 reads these tokens on the device. Planning waits until N is nearly done, so that late requests still join N+1.

    thread  | plan N+1, launch fwd N+1 | collect N, commit N, launch sample N+1, deliver N | gather ... | plan N+2
    stream  | ... fwd N, sample N | fwd N+1 ......................... sample N+1 | fwd N+2

In: the inbox (submit, abort, pause, call, stop; on a CPU the stream also puts each finished step there). Out: one
StepOutput per step to the event loop, through the ring of the GIL-free steps, else by call_soon_threadsafe.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any

import torch

from _fast.plan import StepPlan
from engine.base.config import EngineConfig
from engine.base.errors import scope_of
from engine.base.failures import TokenBudget
from engine.base.inbox import Abort, Call, Conclude, Enter, Inbox, Message, Pause, Stop, Submit
from engine.base.output import StepOutput, columns, drafted_of, from_ring
from engine.base.request import FinishReason, Request
from engine.base.stats import StepStats
from engine.run.pace import Pace
from engine.run.runtime import Runtime
from engine.run.settle import Settler
from engine.run.start import load_runtime
from engine.step.step import Step

if TYPE_CHECKING:
    from _fast.ring import OutputRing
    from engine.run.steady import SteadySteps

log = logging.getLogger("omniloop.engine")

MAX_LATE_ITEMS = 8  # inbox items still admitted after the planning deadline when waiting prompts already fill a step


class DeviceThread:
    """The device thread. Other threads call the first group of methods; the rest runs on the thread itself."""

    def __init__(
        self,
        config: EngineConfig,
        loop: asyncio.AbstractEventLoop,
        ready: asyncio.Future[Any],
        on_output: Callable[[StepOutput], None],
        on_late: Callable[[str, dict[int, Any]], None],
        on_death: Callable[[BaseException], None],
        startup: dict[str, float],
    ) -> None:
        self._config = config
        self._loop = loop
        self._ready = ready
        self.on_output = on_output
        self._on_late = on_late
        self._on_death = on_death
        self._startup = startup
        self.inbox = Inbox()
        self.thread = threading.Thread(target=self._main, name="omniloop-device", daemon=True)
        self.runtime: Runtime | None = None  # set after loading
        self._stopping = False
        self._paused = False  # True: no step is planned; running requests stay in their slots
        self.pace: Pace
        self._budget: TokenBudget
        self.settler: Settler
        self.steady: SteadySteps | None = None
        self._last_beat = time.monotonic()

    # -- called from other threads ------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts loading. `ready` gets (ModelConfig, Limits) or an exception, on the event loop."""
        self.thread.start()

    def submit(self, request: Request, first_id: int) -> None:
        """Adds a request. Its choices have the numbers first_id, first_id + 1, and so on."""
        self.inbox.put(Submit(request, first_id))

    def abort(self, device_id: int) -> None:
        """Ends one choice; takes effect between two steps."""
        self.inbox.put(Abort(device_id))

    def conclude(self, device_id: int) -> None:
        """Ends one choice once its tokens so far are computed; its extras are still delivered."""
        self.inbox.put(Conclude(device_id))

    def pause(self, paused: bool) -> None:
        """Stops the planning of steps, or resumes it."""
        self.inbox.put(Pause(paused))

    def call(self, work: Callable[[Runtime], Any], done: asyncio.Future[Any]) -> None:
        """Runs `work` between two steps; its result or error is set in `done` on the event loop."""
        self.inbox.put(Call(work, done))

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the thread after the steps in flight; waits for at most `timeout` seconds."""
        self.inbox.put(Stop())
        self.thread.join(timeout)
        if not self.thread.is_alive():  # a live thread may still read the inbox's descriptor
            self.inbox.close()

    @property
    def ring(self) -> OutputRing | None:
        """The ring that carries step outputs, once ready; None: each output is a call on the event loop."""
        return self.steady.ring if self.steady is not None else None

    @property
    def last_beat(self) -> float:
        """time.monotonic() of the thread's last iteration."""
        return max(self._last_beat, self.steady.last_beat if self.steady is not None else 0.0)

    def ledger(self) -> dict[str, int]:
        """Counts of resources in use; exact when no step runs."""
        runtime = self.runtime
        if runtime is None:
            return {}
        return runtime.scheduler.ledger() | runtime.admission.ledger() | {"inbox": len(self.inbox)}

    # -- the thread -----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        with torch.inference_mode():
            try:
                runtime = self.runtime = load_runtime(self._config, self._startup, self._wake)
                backend = runtime.executor.backend
                self.pace = Pace(
                    runtime.sizes.max_tokens, backend.can.tile, backend.fullness, self._config.batch_slowdown
                )
                self._budget = TokenBudget(runtime.sizes.max_tokens, runtime.sizes.least_tokens)
                self.settler = Settler(runtime, self.pace, self._budget)
                self.steady = runtime.steady(self.inbox)
            except BaseException as error:
                self._call(_resolve, self._ready, None, error)
                return
            self._call(_resolve, self._ready, (runtime.model_config, runtime.limits), None)
            try:
                self._run(runtime)
            except BaseException as error:
                log.exception("the device thread ended")
                self._call(self._on_death, error)
            finally:
                runtime.executor.backend.close()

    def _run(self, runtime: Runtime) -> None:
        previous: Step | None = None
        held: StepOutput | None = None  # delivered once the next step is launched: delivery takes the GIL
        stats = StepStats()
        while True:
            plan = None
            if runtime.admission.late:
                self._deliver_late(runtime)
            if self.steady is not None and self._goes_steadily(runtime, previous):
                if held is not None:
                    self._deliver(runtime, held, stats)
                    held = None
                previous, plan = self.run_steadily(runtime, previous, stats)
            if plan is None:
                self._gather(runtime, previous)
                if self._stopping and previous is None:
                    return
            plan = plan or self._plan(runtime, stats)  # step N+1: the plan
            step = self._launch(runtime, plan, stats) if plan is not None else None  # ... and its forward
            if held is not None:
                self._deliver(runtime, held, stats)
            held = output = None
            if previous is not None:
                output = self.settler.settle(previous, stats)  # step N: the only wait, then the commit
                if self.settler.restarts:
                    self.settler.restage(step)
            if step is not None:
                self.launch_sample(runtime, step, stats)  # step N+1: its allowed tokens are known now
            if output is not None:
                # An iteration that settles no step adds its times to those of the next settled step.
                stats = StepStats()
                if step is not None and step.times.plan_at:  # the next step is planned at once
                    held = output
                else:
                    self._deliver(runtime, output, stats)
            elif runtime.admission.refused:
                self._deliver(runtime, self.settler.empty_output(), stats)
            previous = step

    def _goes_steadily(self, runtime: Runtime, previous: Step | None) -> bool:
        assert self.steady is not None
        if self._stopping or self._paused or not runtime.has_work:
            return False
        if runtime.admission.refused or self.settler.restarts:
            return False
        return self.steady.may_follow(previous)

    def run_steadily(
        self, runtime: Runtime, previous: Step | None, stats: StepStats
    ) -> tuple[Step | None, StepPlan | None]:
        """Runs steps without the GIL. Returns the step in flight and the next plan if Python has to launch it."""
        assert self.steady is not None
        while True:
            # The GIL-free loop plans first steps of waiting requests, and steps with idle rows, with these budgets.
            if runtime.scheduler.num_waiting or runtime.scheduler.shares.any_idle():
                self.pace.set_budgets(runtime.scheduler.shares, self._budget.of(runtime.scheduler.next_step))
            handover = self.steady.run(previous)
            numbers = handover.numbers
            if handover.uncommitted is not None:
                output = self.settler.settle(handover.uncommitted, StepStats())
                of = output.stats
                of.schedule_s, of.launch_s, of.wait_s = numbers.schedule_s, numbers.launch_s, numbers.wait_s
                of.device_s, of.gap_s = numbers.device_s, numbers.gap_s
                of.launched_at, of.ended_at, of.waited_at = numbers.launched_at, numbers.ended_at, numbers.ended_at
                self._deliver(runtime, output, StepStats())
            elif handover.unpublished is not None:
                plan = handover.unpublished
                counts = runtime.scheduler.drafts.counts if plan.width > 1 else None
                drafted = drafted_of(plan) if runtime.config.report_drafts else ()
                news = (numbers, *columns(plan)[:3], handover.logprobs, counts, drafted)
                self._deliver(runtime, from_ring(news, runtime.limits.num_blocks), StepStats())
            if handover.freed and handover.uncommitted is None:
                runtime.admission.free_slots()
                if runtime.admission.late:
                    self._deliver_late(runtime)
            previous = handover.in_flight
            if handover.planned is not None:
                stats.schedule_s += numbers.schedule_s
            if not handover.may_resume or runtime.admission.refused:
                for rows_bits, seconds in self.steady.learned():
                    self.pace.note_decode(rows_bits, seconds)
                return previous, handover.planned

    def _gather(self, runtime: Runtime, previous: Step | None) -> None:
        """Drains the inbox until the next step must be planned.

        After that moment the drain stops once MAX_LATE_ITEMS more items are taken and the prompts fill a step. The
        device would be idle while further requests are admitted.
        """
        until, late = None, 0
        if self.steady is not None:
            self.inbox.hush()
        if previous is not None:
            until = self.pace.plan_at(previous)
        elif self._stopping or (runtime.has_work and not self._paused):
            until = 0.0
        while True:
            self._last_beat = time.monotonic()
            wait = 1.0 if until is None else until - time.perf_counter()
            try:
                item = self.inbox.take(wait)
            except Empty:
                if until is None:
                    continue
                return
            if isinstance(item, Step):
                if item is previous:  # done earlier than expected: plan once the inbox is empty
                    until = 0.0
                continue
            self._take(runtime, item)
            runs = runtime.has_work and not self._paused
            if until is None and (self._stopping or runtime.admission.refused or runs):
                until = 0.0
            late += until is not None and time.perf_counter() >= until
            if late >= MAX_LATE_ITEMS and runtime.fills_a_step:
                self.inbox.remind()
                return

    def _take(self, runtime: Runtime, message: Message) -> None:
        """Handles one message. An error affects only the sender's request, unless the device is lost."""
        try:
            match message:
                case Submit(request, first_id):
                    runtime.admission.submit(request, first_id)
                case Abort(device_id):
                    runtime.admission.abort(device_id)
                case Conclude(device_id):
                    runtime.admission.conclude(device_id)
                case Pause(paused):
                    self._paused = paused
                case Call(work, done):
                    self._answer(work, runtime, done)
                case Enter():
                    runtime.admission.enter()
                case Stop():
                    self._stopping = True
        except Exception as error:
            if scope_of(error) == "device":
                raise
            log.exception("a message of the loop failed: %s", type(message).__name__)

    def _answer(self, work: Callable[[Runtime], Any], runtime: Runtime, done: asyncio.Future[Any]) -> None:
        """Runs a Call; an error of `work` goes to the caller through `done`."""
        try:
            self._call(_resolve, done, work(runtime), None)
        except Exception as error:
            self._call(_resolve, done, None, error)

    def _plan(self, runtime: Runtime, stats: StepStats) -> StepPlan | None:
        if self._stopping or self._paused:
            return None
        begun = time.perf_counter()
        self.pace.set_budgets(runtime.scheduler.shares, self._budget.of(runtime.scheduler.next_step))
        plan = runtime.executor.plan(runtime.scheduler)
        if runtime.scheduler.queue.num_expired:
            runtime.admission.drop_expired()
        stats.schedule_s += time.perf_counter() - begun
        return plan

    def _launch(self, runtime: Runtime, plan: StepPlan, stats: StepStats) -> Step:
        begun = time.perf_counter()
        step = runtime.executor.launch_forward(plan)
        stats.launch_s += time.perf_counter() - begun
        return step

    def launch_sample(self, runtime: Runtime, step: Step, stats: StepStats) -> None:
        begun = time.perf_counter()
        runtime.executor.launch_sample(step, self.inbox.put)
        stats.launch_s += time.perf_counter() - begun

    def _deliver(self, runtime: Runtime, output: StepOutput, stats: StepStats) -> None:
        """Sends a step's output to the event loop. The time counts in `stats`, which the next settled step reports."""
        begun = time.perf_counter()
        for device_id, error in runtime.admission.refused.items():
            output.invalid[output.add(device_id, -1, FinishReason.ERROR)] = error
        runtime.admission.refused.clear()
        if self.steady is not None:
            self.steady.ring.put(output)
        else:
            self._call(self.on_output, output)
        stats.commit_s += time.perf_counter() - begun

    def _deliver_late(self, runtime: Runtime) -> None:
        """Sends extras of choices whose slots were freed, before or after the loop has received the choices' ends."""
        found, runtime.admission.late = runtime.admission.late, {}
        for name, values in found.items():
            self._call(self._on_late, name, values)

    def _wake(self) -> None:
        """Asks for another check of the gates at which requests wait (any thread)."""
        self.inbox.put(Enter())

    def _call(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop has closed
            log.debug("the event loop is closed; dropped %s", call)


def _resolve(ready: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if ready.done():
        return
    if error is not None:
        ready.set_exception(error)
    else:
        ready.set_result(value)
