"""Builds a Runtime from a model with loaded weights: sizes the cache, allocates buffers, captures graphs.

Thread: device. `on_host` builds the CPU's backend, `on_device` the accelerator's; both build the same Executor with the
same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from engine.base.config import EngineConfig
from engine.cache.sizing import fit_context, host_blocks
from engine.device.accelerator import Accelerator
from engine.device.host import usable_cores
from engine.device.memory import enough_for
from engine.parallel.model import SplitModel
from engine.run.planned import Planned
from engine.run.runtime import Runtime
from engine.step.plain import Executor
from engine.step.rank import Rank

Phase = Callable[[str], AbstractContextManager[None]]


def on_host(
    config: EngineConfig, plan: Planned, accelerators: Sequence[Accelerator], wake: Callable[[], None], phase: Phase
) -> Runtime:
    """Builds a Runtime on the CPU."""
    from engine.step.backend.host.startup import host_backend

    model, sizes, layout = plan.model, plan.sizes, plan.layout
    rank = Rank(0, model, layout.of_rank(0, config.tensor_parallel))
    with phase("cache"):
        longest = layout.blocks_for(sizes.max_model_len, sizes.max_chunk)
        blocks = host_blocks(config, layout, longest, sizes.max_rows)
        context = fit_context(config, layout, sizes.max_model_len, sizes.max_chunk, blocks)
        sizes = replace(sizes, max_model_len=context)
        rank.allocate(blocks, config.debug_poison)
        if isinstance(model, SplitModel):
            model.allocate(layout, blocks, config.debug_poison)
    backend = host_backend(config, rank, sizes, plan.hooks, plan.endings)
    executor = Executor([rank], backend, plan.parts, wake)
    executor.start()
    executor.allocate(blocks)
    return Runtime(config, executor, sizes, blocks)


def on_device(
    config: EngineConfig, plan: Planned, accelerators: Sequence[Accelerator], wake: Callable[[], None], phase: Phase
) -> Runtime:
    """Builds a Runtime on accelerators, one for each rank."""
    from engine.step.backend.device.backends import pooling_backend, token_backend
    from engine.step.backend.device.startup import Startup
    from engine.step.backend.device.times import measured_on_device

    memory, sizes, pools = accelerators[0].memory, plan.sizes, plan.model.pooler is not None
    ranks = [
        Rank(number, plan.model, plan.layout.of_rank(number, len(accelerators)), each)
        for number, each in enumerate(accelerators)
    ]
    with phase("buffers"), enough_for("buffers", memory):
        make = pooling_backend if pools else token_backend
        backend, forward = make(config, ranks, sizes, plan.hooks, plan.endings)
        executor = Executor(ranks, backend, plan.parts, wake)
        executor.start()
        start = Startup(config, backend, forward, executor, plan.claim)
    with phase("kernels"), enough_for("profiling", memory):
        start.compile(usable_cores())
    with phase("profile"), enough_for("profiling", memory):
        blocks = start.profile()
        context = fit_context(config, plan.layout, sizes.max_model_len, sizes.max_chunk, blocks)
    with phase("cache"), enough_for("cache", memory):
        start.allocate(blocks, config.debug_poison)
    with phase("graphs"), enough_for("graphs", memory):
        start.capture()
    return Runtime(
        config, executor, replace(sizes, max_model_len=context), blocks, partial(measured_on_device, config, backend)
    )
