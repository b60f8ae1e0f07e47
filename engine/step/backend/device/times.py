"""Measures the seconds of an accelerator's steps by size, from replays of its graphs, for a server with drafts.

Thread: device, at the end of the start. Replays run over inputs without rows. So reading the contexts' keys and values
is not part of their times; it takes as long with drafts as without, and is estimated from the memory's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from _fast import kinds
from _fast.layout import GraphKind
from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.cache.layout import CacheLayout
from engine.cache.spec import CacheSpec
from engine.cache.tokens import GuestSpec
from engine.step.backend.device.backend import DeviceBackend
from engine.step.sizes import decode_sizes, line_sizes, pass_sizes
from engine.step.times import MOST_SECONDS, Times, curve, some, timed

MOST_SIZES = 6  # of a kind of graph
READ_BYTES = 512 << 20  # of the timed pass: more than the device's caches hold


def measured_on_device(config: EngineConfig, backend: DeviceBackend) -> Times:
    """Seconds by size; without graphs (enforce_eager) all steps count as equally long, and passes as nothing."""
    sizes, drafting = backend.sizes, backend.drafting_variant
    begun, rows = time.perf_counter(), decode_sizes(sizes.max_rows, config.cudagraph_capture_sizes)
    lines = sorted({*rows, *line_sizes(sizes.max_rows, sizes.max_lines)})
    mixed = [size for size in sizes.mixed if size <= sizes.max_rows + sizes.max_lines]
    kinds = [
        (int(GraphKind.MIXED), drafting, mixed, sizes.max_tokens),
        (int(GraphKind.SAMPLE), drafting, lines, sizes.max_lines),
        (int(GraphKind.DECODE), 0, rows, sizes.max_rows),
        (int(GraphKind.SAMPLE), 0, rows, sizes.max_rows),
    ]
    if not config.enforce_eager:
        kinds += [(kind, 0, pass_sizes(sizes.max_rows), sizes.max_rows) for kind in backend.buffers.pass_kinds]
    curves = []
    for number, (kind, variant, graphs, most) in enumerate(kinds, 1):
        calls = [(size, partial(replayed, config, backend, kind, size, variant)) for size in some(graphs, MOST_SIZES)]
        until = begun + MOST_SECONDS * number / len(kinds)
        curves.append(curve(timed(calls, until, time.perf_counter), most, graphs))
    forward, choice, decode, decode_choice, first, further = [*curves, np.zeros(0), np.zeros(0)][:6]
    layout, rate = backend.rank.layout, seconds_per_byte(backend)
    reading, of_pass = (context_bytes(specs, layout.block_size) * rate for specs in (layout.specs, guests(layout)))
    return Times(decode + decode_choice, forward, choice, reading, first, further, of_pass)


def guests(layout: CacheLayout) -> list[CacheSpec]:
    """The layers of a drafter."""
    return [spec for spec in layout.specs if isinstance(spec, GuestSpec)]


def context_bytes(specs: Sequence[CacheSpec], block_size: int) -> float:
    """Bytes that layers read for each token of a long context, of those layers that read every earlier token."""
    found = [spec for spec in specs if spec.kind.has_tables and spec.kind.number == kinds.FULL]
    return sum(spec.block_bytes(block_size) for spec in found) / block_size


def seconds_per_byte(backend: DeviceBackend) -> float:
    """Seconds in which the device reads a byte of the KV cache, from one pass over a part of it."""
    cache = backend.rank.caches[0][0]
    words = torch.empty(0, dtype=torch.int32, device=cache.device).set_(cache.untyped_storage())[: READ_BYTES // 4]
    return timed_call(backend, words.amax) / (4 * len(words))


def replayed(config: EngineConfig, backend: DeviceBackend, kind: int, size: int, variant: int) -> float:
    """Seconds of a graph, after a first replay."""
    if config.enforce_eager:
        return 1.0
    return timed_call(backend, lambda: backend.launcher.replay(kind, size, variant))


def timed_call(backend: DeviceBackend, launch: Callable[[], object]) -> float:
    """Seconds of what `launch` launches, after a first time. Raises ConfigError if it does not end."""
    seconds, done, limit = 0.0, backend.accelerator.event(), 10 * backend.config.step_timeout
    for _ in range(2):
        begun = time.perf_counter()
        launch()
        done.record()
        while not done.query():
            if time.perf_counter() - begun > limit:
                raise ConfigError(f"a step that is timed at the start did not end in {limit:g} s; is the GPU in use?")
        seconds = time.perf_counter() - begun
    return seconds
