"""The warm-up: an internal request runs through the normal path before the first client's request.

Owner: the device thread, at the end of the start. In: a runtime without requests. Out: the same runtime; all kernels of
a plain step are compiled and all buffers touched. Raises ConfigError if a step does not end or memory is too small.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from engine.base.errors import ConfigError
from engine.base.request import Request, SamplingParams
from engine.device.accelerator import Accelerator
from engine.device.memory import enough_for
from engine.run.runtime import Runtime
from engine.step.live import LiveRow, Place


def warmed(runtime: Runtime, accelerator: Accelerator | None) -> None:
    """Warms up. If device memory is too small, the ConfigError says what the operator can change."""
    with enough_for("warmup", accelerator.memory) if accelerator is not None else nullcontext():
        warm_up(runtime)


def warm_up(runtime: Runtime) -> None:
    """Runs one prompt and its decode steps through the normal path, so the first request compiles nothing."""
    scheduler, executor = runtime.scheduler, runtime.executor
    prompt = np.zeros(max(1, min(32, runtime.limits.max_model_len - 3)), np.int32)
    request = Request(prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    empty = np.zeros(0, np.int32)
    slot = scheduler.add(
        0,
        prompt,
        max_tokens=2,
        min_tokens=0,
        ignore_eos=True,
        eos_ids=empty,
        stop_ids=empty,
        priority=0,
        arrival=0.0,
        root=bytes(16),
        read_cache=False,
    )
    executor.admit(slot, LiveRow(0, 0, request, 0, Place(bytes(16))))
    while (plan := executor.plan(scheduler)) is not None:
        step = executor.launch_forward(plan)
        executor.launch_sample(step, lambda _: None)
        if not step.event.wait(runtime.config.step_timeout * 10):
            raise ConfigError("the warm-up step did not end; is the machine out of memory?")
        if step.error is not None:
            raise step.error
        executor.collect(step)
        assert step.home.tokens is not None
        scheduler.commit(plan, step.home.tokens.reshape(-1))
    scheduler.reset_prefix_cache()
    executor.reset(slot, poison=False)
