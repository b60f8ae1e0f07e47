"""Gives the scheduler what decides on a step's drafts: settings, times of steps, and whether the drafter may rest.

Thread: device, at the end of the start. On a CPU the times are measured here, by steps of prompts of one token; on an
accelerator they come from replays of graphs (engine/step/backend/device/times).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from engine.base.drafts import draft_config
from engine.base.errors import ConfigError
from engine.base.request import Request, SamplingParams
from engine.step.live import LiveRow, Place
from engine.step.times import MOST_SECONDS, Times, curve, some, timed

if TYPE_CHECKING:
    from engine.run.runtime import Runtime

MOST_SIZES = 6


def set_budget(runtime: Runtime) -> None:
    """Configures the budget of a server with drafts. No request is open."""
    budget, config = runtime.scheduler.drafts.budget, draft_config(runtime.config.speculative)
    assert config is not None
    budget.set_most(config.by_rows)
    if not config.adaptive:
        return
    found = times_of(runtime)
    budget.set_times(found.plain, found.mixed, found.choice)
    budget.times.set_reading(found.reading)
    if len(found.first):
        budget.times.set_passes(found.first, found.further, found.pass_reading)
    if variant := runtime.executor.backend.drafting_variant:
        budget.let_rest(variant)


def times_of(runtime: Runtime) -> Times:
    """Measures the times of steps. Raises ConfigError if a step does not end."""
    return runtime.measured() if runtime.measured is not None else measured_on_host(runtime)


def measured_on_host(runtime: Runtime) -> Times:
    """Times of steps on a CPU, where a step takes as long as its number of tokens needs."""
    sizes = runtime.sizes
    until = time.perf_counter() + MOST_SECONDS
    counts = some(range(1, sizes.max_rows + 1), MOST_SIZES)
    calls = [(count, lambda count=count: _step_of(runtime, count)) for count in counts]
    seconds = curve(timed(calls, until, time.perf_counter), sizes.max_tokens)
    return Times(seconds, seconds, np.zeros(1))


def _step_of(runtime: Runtime, count: int) -> float:
    """Seconds of a step with so many rows of one token; the shorter of two."""
    return min(_timed_step(runtime, count) for _ in range(2))


def _timed_step(runtime: Runtime, count: int) -> float:
    scheduler, executor = runtime.scheduler, runtime.executor
    prompt, empty = np.zeros(1, np.int32), np.zeros(0, np.int32)
    request = Request(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    slots = []
    for number in range(count):
        slot = scheduler.add(
            number, prompt, max_tokens=1, ignore_eos=True, eos_ids=empty, stop_ids=empty, read_cache=False
        )
        assert slot >= 0, "no request is open"
        executor.admit(slot, LiveRow(number, 0, request, 0, Place(bytes(16))))
        slots.append(slot)
    begun, most = time.perf_counter(), 0.0
    while (plan := executor.plan(scheduler)) is not None:  # one step, unless blocks are few
        begun = time.perf_counter()
        step = executor.launch_forward(plan)
        executor.launch_sample(step, lambda _: None)
        if not step.event.wait(runtime.config.step_timeout * 10):
            raise ConfigError("a step that is timed at the start did not end; is the machine out of memory?")
        if step.error is not None:
            raise step.error
        executor.collect(step)
        most = max(most, time.perf_counter() - begun)
        assert step.home.tokens is not None
        scheduler.commit(plan, step.home.tokens.reshape(-1))
    for slot in slots:
        executor.reset(slot, poison=False)
    return most
