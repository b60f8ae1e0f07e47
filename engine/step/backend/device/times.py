"""Measures the seconds of an accelerator's steps by size, from replays of its graphs, for a server with drafts.

Thread: device, at the end of the start. Replays run over inputs without rows. So reading the contexts' keys is not part
of the times; it takes as long with drafts as without.
"""

from __future__ import annotations

import time
from functools import partial

from _fast.layout import GraphKind
from engine.base.config import EngineConfig
from engine.step.backend.device.backend import DeviceBackend
from engine.step.sizes import decode_sizes, line_sizes, mixed_sizes
from engine.step.times import MOST_SECONDS, Times, curve, some, timed

MOST_SIZES = 6  # of a kind of graph


def measured_on_device(config: EngineConfig, backend: DeviceBackend) -> Times:
    """Seconds by size; without graphs (enforce_eager) all steps count as equally long."""
    sizes, drafting = backend.sizes, backend.drafting_variant
    begun, rows = time.perf_counter(), decode_sizes(sizes.max_rows, config.cudagraph_capture_sizes)
    lines = sorted({*rows, *line_sizes(sizes.max_rows, sizes.max_lines)})
    mixed = [size for size in mixed_sizes(sizes.most_graphed) if size <= sizes.max_rows + sizes.max_lines]
    kinds = (
        (GraphKind.MIXED, drafting, mixed, sizes.max_tokens),
        (GraphKind.SAMPLE, drafting, lines, sizes.max_lines),
        (GraphKind.DECODE, 0, rows, sizes.max_rows),
        (GraphKind.SAMPLE, 0, rows, sizes.max_rows),
    )
    curves = []
    for number, (kind, variant, graphs, most) in enumerate(kinds, 1):
        calls = [(size, partial(replayed, config, backend, kind, size, variant)) for size in some(graphs, MOST_SIZES)]
        until = begun + MOST_SECONDS * number / len(kinds)
        curves.append(curve(timed(calls, until, time.perf_counter), most, graphs))
    return Times(curves[2] + curves[3], curves[0], curves[1])


def replayed(config: EngineConfig, backend: DeviceBackend, kind: int, size: int, variant: int) -> float:
    """Seconds of a graph, after a first replay."""
    if config.enforce_eager:
        return 1.0
    seconds, done = 0.0, backend.accelerator.event()
    for _ in range(2):
        begun = time.perf_counter()
        backend.launcher.replay(kind, size, variant)
        done.record()
        done.synchronize()
        seconds = time.perf_counter() - begun
    return seconds
