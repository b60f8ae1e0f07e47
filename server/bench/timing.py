"""Times of calls on a CPU or an accelerator, and the rates of the machine, measured in the same run.

Owner: the command's main thread. On an accelerator CALLS calls are captured in one graph, which gives the device's
time; calls launched one by one would give the host's launch time. Calls with different inputs alternate, so that no
cache holds their inputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

CALLS = 20  # calls captured in a graph
ENOUGH_S, LEAST_TIMES, MOST_TIMES = 0.5, 5, 200
COLD = 1 << 28  # bytes that no cache holds
COPIED, SIDE = {"cpu": 1 << 26, "cuda": 1 << 29}, {"cpu": 512, "cuda": 8192}  # bytes copied, rows of a product

Call = Callable[[], object]
Times = tuple[float, float, float]  # seconds: median, p10, p90


def chosen_device(name: str) -> str:
    """cpu or cuda (ROCm too). Raises ValueError."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: torch sees no accelerator here; leave the flag out for the CPU")
    return name if name != "auto" else "cuda" if there else "cpu"


def rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes per second of a copy, operations per second of a product), measured now.

    The copy is the faster of torch's copy and a kernel that negates: too slow a copy would give fractions above one.
    """
    count, side = COPIED[device] // dtype.itemsize, SIDE[device]
    sources = torch.randn(2, count, device=device, dtype=dtype)
    targets = torch.empty_like(sources)
    ways: list[list[Call]] = [
        [partial(target.copy_, source) for source, target in zip(sources, targets)],
        [partial(torch.neg, source, out=target) for source, target in zip(sources, targets)],
    ]
    copied = 2 * COPIED[device] / min(time_of(way, device) for way in ways)
    # Few CPUs multiply bfloat16 in hardware; the kernels multiply in float32, so float32's rate is measured.
    a, b = torch.randn(2, side, side, device=device, dtype=torch.float32 if device == "cpu" else dtype)
    return copied, 2 * side**3 / time_of([lambda: a @ b], device)


def time_of(calls: Sequence[Call], device: str, recorded: bool = True) -> float:
    """Median seconds of a call; see `times_of`."""
    return times_of(calls, device, recorded)[0]


def times_of(calls: Sequence[Call], device: str, recorded: bool = True) -> Times:
    """Seconds of a call, after one unmeasured call of each. `recorded`: False for calls that read their results."""
    for call in calls:
        call()
    once = on_host if device == "cpu" else recorded_calls(calls) if recorded else on_device
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < LEAST_TIMES or (len(times) < MOST_TIMES and time.perf_counter() - begun < ENOUGH_S):
        times.append(once(calls[len(times) % len(calls)]))
    times.sort()
    return statistics.median(times), times[len(times) // 10], times[len(times) * 9 // 10]


def on_host(call: Call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def on_device(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def recorded_calls(calls: Sequence[Call]) -> Callable[[Call], float]:
    """Capture CALLS calls, which cycle through `calls`, in a CUDA graph. The result replays the graph and returns the
    mean seconds per call; it ignores its argument."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(CALLS):
            calls[number % len(calls)]()
    for _ in range(3):
        graph.replay()
    return lambda _: on_device(graph.replay) / CALLS
