"""An engine without a server in this process, and batches of random requests for it: for throughput and latency.

Owner: the loop of the command. In: the server's Config; only the engine's flags are used. Out: times of each request's
first and last token, and counts and times of the steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from engine import Delta, Engine, FinishReason, Request, SamplingParams
from engine.base.stats import StepStats
from server.flags.config import Config
from server.start.folders import drafter_folder, hub_of, located


@dataclass(slots=True)
class Crowd:
    """Requests that were sent together; times are seconds of time.perf_counter."""

    begun: float = 0.0
    ended: float = 0.0
    firsts: list[float] = field(default_factory=list)  # one time per request
    lasts: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    rows: int = 0  # sum over all steps
    host_s: float = 0.0  # time of the device thread: plan, launch, settle

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Engine]:
    """A started engine. Raises EngineError."""
    weights = config.model.load_format != "dummy"
    hub = hub_of(config)
    folder = located(config, config.folder, hub, weights)
    engine = Engine(config.engine(folder, drafter_folder(config, hub)))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(0.0)


def random_prompts(engine: Engine, count: int, length: int, draw: np.random.Generator) -> list[np.ndarray]:
    """Random prompts without common prefixes."""
    return [draw.integers(2, engine.limits.vocab_size, length, dtype=np.int32) for _ in range(count)]


async def run_crowd(engine: Engine, prompts: list[np.ndarray], max_tokens: int) -> Crowd:
    """Submit all prompts at once, up to the engine's limit: greedy, full length. Raises the error of a request
    that fails.
    """
    crowd = Crowd(firsts=[0.0] * len(prompts), lasts=[0.0] * len(prompts))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    places = asyncio.Semaphore(engine.limits.max_open)

    def add(stats: StepStats) -> None:
        crowd.steps += stats.num_rows > 0
        crowd.rows += stats.num_rows
        crowd.host_s += stats.schedule_s + stats.launch_s + stats.commit_s

    async def one(number: int, prompt: np.ndarray) -> None:
        done = asyncio.get_running_loop().create_future()

        def take(delta: Delta) -> None:
            now = time.perf_counter()
            if delta.error is not None and not done.done():
                done.set_exception(delta.error)
            crowd.tokens += len(delta.token_ids)
            crowd.firsts[number] = crowd.firsts[number] or now
            crowd.lasts[number] = now
            if delta.finish_reason is not FinishReason.NONE and not done.done():
                done.set_result(None)

        async with places:
            stream = engine.submit(Request(prompt, sampling))
            stream.subscribe(take)
            try:
                await done
            finally:
                stream.close()

    engine.on_step = add
    crowd.begun = time.perf_counter()
    try:
        await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    finally:
        engine.on_step = None
    crowd.ended = max(crowd.lasts)
    return crowd
