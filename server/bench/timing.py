"""Times of single calls on a CPU or an accelerator, and the rates of the machine, measured in the same run.

Owner: the command's main thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

LEAST_S, LEAST_CALLS, MOST_CALLS = 0.2, 5, 200
COPIED, SIDE = 1 << 26, {"cpu": 512, "cuda": 8192}  # bytes of the copy, and rows of the product, that tell the rates


def chosen_device(name: str) -> str:
    """cpu or cuda (ROCm too). Raises ValueError."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: torch sees no accelerator here; leave the flag out for the CPU")
    return name if name != "auto" else "cuda" if there else "cpu"


def rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes per second of a copy, operations per second of a product) here and now."""
    source = torch.randn(COPIED // 4, device=device)
    target = torch.empty_like(source)
    side = SIDE[device]
    # Few CPUs multiply bfloat16 themselves, and torch's products in it tell nothing of the kernel's, in float32.
    a, b = torch.randn(2, side, side, device=device, dtype=torch.float32 if device == "cpu" else dtype)
    copied = 2 * COPIED / time_of(lambda: target.copy_(source), device)
    return copied, 2 * side**3 / time_of(lambda: a @ b, device)


def time_of(call: Callable[[], object], device: str) -> float:
    """Median seconds of a call, behind a first one."""
    call()
    times: list[float] = []
    while len(times) < LEAST_CALLS or (len(times) < MOST_CALLS and sum(times) < LEAST_S):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        else:
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
    return statistics.median(times)
