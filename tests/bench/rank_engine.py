"""One engine on one or several ranks, for gpu_parallel: the times of its steps and of its launches.

Random weights of real shapes, without HTTP. Each measurement is a function that yields numbers by name. Thread: the
loop's; launches are timed on the device thread.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from _fast.layout import GraphKind
from engine import Engine, EngineConfig, Request, SamplingParams
from tests.bench.gpu_step import steps_of

REPEATS = 3
TOKENS = 128  # of an answer; contexts are these around a mean
SPARE = 48  # further tokens, while the prompts of many rows are computed
LAUNCHES = 40
GAP_EVERY = 4


class RankEngine:
    """An engine, and random prompts for it."""

    def __init__(self, folder: str, device: str, **settings: Any) -> None:
        self.settings = {"load_format": "dummy", "enable_prefix_caching": False, "device": device, **settings}
        self.engine = Engine(EngineConfig(folder, **self.settings))
        self._draw = np.random.default_rng(0)

    async def measure(self, names: list[str], prompt: int) -> AsyncIterator[dict[str, Any]]:
        """Starts, and yields {"what": ..., "ms": ... or "us": ...}.

        names: "1x576" (rows x context), "prompt" (of so many tokens), "host"."""
        begun = time.perf_counter()
        await self.engine.start()
        phases = {name: round(seconds, 1) for name, seconds in self.engine.startup.items()}
        yield {"what": "start", "s": round(time.perf_counter() - begun, 1), "phases": phases}
        try:
            for name in names:
                if name == "prompt":
                    yield {"what": f"prompt of {prompt}", "ms": await self.prompt(prompt)}
                elif name == "host":
                    async for line in self.host():
                        yield line
                else:
                    rows, context = map(int, name.split("x"))
                    yield {"what": f"{rows} rows at {context}", "ms": await self.step(rows, context)}
        finally:
            await self.engine.stop(5)

    async def step(self, rows: int, context: int) -> float:
        """Milliseconds of a step of so many rows whose contexts have the mean `context`."""
        repeats = REPEATS if rows <= 16 else 2  # their prompts take seconds
        return 1e3 * statistics.median([await self._steps(rows, context) for _ in range(repeats)])

    async def _steps(self, rows: int, context: int) -> float:
        spare = SPARE if rows > 16 else 0
        requests = self._requests(rows, context - (TOKENS + spare) // 2, TOKENS + spare)
        return (await steps_of(self.engine, requests))[0]

    async def prompt(self, length: int) -> float:
        """Milliseconds from a request's start to its first token."""
        await steps_of(self.engine, self._requests(1, length, 1))
        found = [(await steps_of(self.engine, self._requests(1, length, 1)))[1] for _ in range(2 * REPEATS - 1)]
        return 1e3 * statistics.median(found)

    async def host(self) -> AsyncIterator[dict[str, Any]]:
        """Microseconds of a launch of a graph on all ranks, and of the device's idle time between steps."""
        inspected = self.engine.inspect()
        assert inspected.runtime is not None
        backend = inspected.runtime.executor.backend
        if not backend.can.graphs:
            return
        yield {"what": "launch of a graph on all ranks", "us": 1e6 * await self.engine.on_device(launch_seconds)}
        backend.measure_gaps(GAP_EVERY)
        gaps: list[float] = []
        self.engine.on_step = lambda stats: gaps.append(stats.gap_s)
        await asyncio.gather(*(self._read(each) for each in self._requests(1, 512, 2 * TOKENS)))
        found = [gap for gap in gaps if gap]
        yield {"what": "idle between steps", "us": 1e6 * statistics.median(found) if found else None}

    async def _read(self, request: Request) -> None:
        async for _ in self.engine.submit(request):
            pass

    def _requests(self, rows: int, length: int, tokens: int) -> list[Request]:
        prompts = self._draw.integers(2, self.engine.limits.vocab_size, (rows, length), dtype=np.int32)
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return [Request(prompt, sampling) for prompt in prompts]


def launch_seconds(runtime: Any) -> float:
    """Host seconds of one launch on all ranks behind a running one, as in steady steps; on the device thread.

    The graph's inputs are those of the last step.
    """
    launcher, took = runtime.executor.backend.launcher, []
    size = launcher.pick(GraphKind.DECODE, 1)
    for _ in range(LAUNCHES):
        launcher.replay(GraphKind.DECODE, size)
        begun = time.perf_counter()
        launcher.replay(GraphKind.DECODE, size)
        took.append(time.perf_counter() - begun)
        for rank in runtime.executor.ranks:
            rank.accelerator.synchronize()
    return statistics.median(took)
