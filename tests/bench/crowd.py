"""Many requests at once through an Engine in this process, with the results of every step: for gpu_offline.

Owner: the loop's thread. Reads of StepStats, once per step: num_rows, num_tokens, schedule_s, launch_s, commit_s and
gap_s (seconds that the device was idle before the step, prep included; 0: not measured). The time of a step is the
arrival of its tokens on the loop. The device thread's CPU time is recorded too; it includes the cost of its waits.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import Delta, Engine, FinishReason, Request, SamplingParams
from engine.base.stats import StepStats


@dataclass(frozen=True, slots=True)
class Moment:
    """The arrival of a step; counts do not yet include the step's tokens."""

    at: float  # seconds of time.perf_counter
    tokens: int  # tokens received by all requests so far
    started: int  # requests with at least two tokens; if this counts all requests, all decode
    ended: int  # requests that have ended
    rows: int  # rows of the step
    step_tokens: int  # tokens computed in the step
    parts_s: tuple[float, float, float]  # the device thread's own work: plan, launch, settle
    gap_s: float  # device idle before the step; 0: not measured
    cpu_s: float  # CPU seconds of the device thread since its start


class Steps:
    """Records an engine's steps. On a device with timers it has every eighth gap between steps measured.

    The step after a measured gap is launched in parts, which takes a few microseconds more.
    """

    def __init__(self, engine: Engine) -> None:
        self.moments: list[Moment] = []
        self.crowd: Crowd | None = None
        device = engine.inspect()
        assert device.runtime is not None
        assert device.thread.ident is not None
        self._cpu_clock = time.pthread_getcpuclockid(device.thread.ident)
        device.runtime.executor.backend.measure_gaps(8)
        engine.on_step = self._add

    def _add(self, stats: StepStats) -> None:
        crowd = self.crowd
        counts = (crowd.tokens, crowd.started, crowd.ended) if crowd is not None else (0, 0, 0)
        parts = stats.schedule_s, stats.launch_s, stats.commit_s
        cpu_s = time.clock_gettime(self._cpu_clock)
        self.moments.append(
            Moment(time.perf_counter(), *counts, stats.num_rows, stats.num_tokens, parts, stats.gap_s, cpu_s)
        )


class Crowd:
    """Requests that are sent together; `run` returns when all have ended."""

    def __init__(self, engine: Engine, prompts: list[np.ndarray], max_tokens: list[int], **rules: Any) -> None:
        self.engine = engine
        self.requests = [request(ids, count, **rules) for ids, count in zip(prompts, max_tokens, strict=True)]
        self.tokens = self.started = self.ended = 0
        self.counts = [0] * len(prompts)
        self.firsts = [0.0] * len(prompts)  # perf_counter of each request's first token
        self.begun = self.done_at = 0.0

    async def run(self, steps: Steps | None = None) -> Crowd:
        """Sends all requests; `steps` records the moments of these requests."""
        if steps is not None:
            steps.crowd, steps.moments = self, []
        self._done = asyncio.get_running_loop().create_future()
        self.begun = time.perf_counter()
        streams = [self.engine.submit(each) for each in self.requests]
        for number, stream in enumerate(streams):
            stream.subscribe(lambda delta, number=number: self._take(number, delta))
        await self._done
        for stream in streams:
            stream.close()
        return self

    def _take(self, number: int, delta: Delta) -> None:
        if delta.finish_reason is FinishReason.ERROR and not self._done.done():
            self._done.set_exception(delta.error or RuntimeError("a request ended with an error"))
            return
        got = len(delta.token_ids)
        if got and not self.counts[number]:
            self.firsts[number] = time.perf_counter()
        before = self.counts[number]
        self.counts[number] += got
        self.tokens += got
        self.started += before < 2 <= self.counts[number]
        if delta.finish_reason is not FinishReason.NONE:
            self.ended += 1
            if self.ended == len(self.counts) and not self._done.done():
                self.done_at = time.perf_counter()
                self._done.set_result(None)

    @property
    def seconds(self) -> float:
        """Seconds from the first submit to the last token."""
        return self.done_at - self.begun


def request(ids: np.ndarray, max_tokens: int, **rules: Any) -> Request:
    """A request of its full length; greedy unless `rules` say otherwise."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **rules})
    return Request(np.asarray(ids, np.int32), sampling)


@dataclass(frozen=True, slots=True)
class Decode:
    """Results of steps in which every row of a crowd decodes and nothing else happens."""

    step_s: float  # seconds between the arrivals of tokens
    context: float  # tokens, mean over rows and steps
    host_s: float  # plan, launch and settle together, median
    parts_s: tuple[float, float, float]  # median of each
    cpu_s: float  # the device thread's CPU time per step: parts_s and the cost of its two waits
    gaps: list[float]  # measured idle times of the device before a step, prep included
    steps: int
    window: tuple[float, float]  # perf_counter of the first and the last step


async def decode(
    engine: Engine, steps: Steps, rows: int, context: int, draw: np.random.Generator, window: int = 0, **rules: Any
) -> Decode:
    """All rows decode at about `context` tokens; rows that are admitted earlier get shorter prompts to match.

    Measures `window` steps; 0 means 96, or fewer for a short context. `rules` apply to each request.
    """
    budget = engine.config.max_num_batched_tokens or 2048
    window = window or max(8, min(96, context // 2))
    lags = [(rows - 1 - row) * context // budget for row in range(rows)]
    lengths = [max(1, context - window // 2 - lag) for lag in lags]
    vocab = engine.limits.vocab_size
    crowd = Crowd(
        engine,
        [draw.integers(2, vocab, length, dtype=np.int32) for length in lengths],
        [window + 2 * lag + 8 for lag in lags],
        **rules,
    )
    await crowd.run(steps)
    # The counts of tokens lag slightly behind the steps, so the first and the last steps are excluded.
    full = [
        number
        for number, m in enumerate(steps.moments)
        if m.started == rows and m.ended == 0 and m.rows == m.step_tokens == rows
    ][2:-2]
    if len(full) < 4:
        raise RuntimeError(f"only {len(full)} steps in which all {rows} rows decoded; the crowd came in too slowly")
    first, last = steps.moments[full[0]], steps.moments[full[-1]]
    count = full[-1] - full[0]
    inside = steps.moments[full[0] + 1 : full[-1] + 1]
    return Decode(
        step_s=(last.at - first.at) / count,
        context=(sum(lengths) + (first.tokens + last.tokens) / 2) / rows,
        host_s=statistics.median(sum(m.parts_s) for m in inside),
        parts_s=(
            statistics.median(m.parts_s[0] for m in inside),
            statistics.median(m.parts_s[1] for m in inside),
            statistics.median(m.parts_s[2] for m in inside),
        ),
        cpu_s=(last.cpu_s - first.cpu_s) / count,
        gaps=[m.gap_s for m in inside if m.gap_s],
        steps=count,
        window=(first.at, last.at),
    )
