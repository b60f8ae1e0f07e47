"""Helpers of engine tests: start an engine on a checkpoint folder, wait until it is idle, collect answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine import Delta, Engine, EngineConfig, FinishReason, Request, SamplingParams

SMALL = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 512, "num_threads": 1}

# Counts of the ledger that are 0 in an idle engine. The device thread releases them one after another, so a test waits
# for all of them.
GONE = ("used", "slots", "running", "waiting", "routes", "streams", "inbox", "live_rows", "backlog", "siblings")
GONE += ("positions", "prompt_logprobs", "tokenwise", "matchers")


@asynccontextmanager
async def running(folder: Path | str, **settings: Any) -> AsyncIterator[Engine]:
    """A started engine. At exit the engine must be idle with all resources released, and is stopped."""
    engine = Engine(EngineConfig(model=str(folder), **{**SMALL, **settings}))
    await engine.start()
    try:
        yield engine
        await quiet(engine)
    finally:
        await engine.stop(5)


async def quiet(engine: Engine, timeout: float = 60.0) -> dict[str, int]:
    """Waits until the engine holds no resource of a request; fails with the ledger if something is still held."""
    if engine.state == "dead":
        return {}
    for _ in range(int(timeout / 0.01)):
        if not any(engine.ledger().get(name) for name in GONE):
            break
        await asyncio.sleep(0.01)
    held = engine.ledger()
    leaks = {name: held[name] for name in GONE if held.get(name)}
    assert not leaks, f"still held: {leaks} of {held}"
    assert held["free"] + held["cached"] == held["total"], held
    return held


async def frozen(engine: Engine, timeout: float = 60.0) -> None:
    """Waits until a paused engine has finished the steps in flight and delivered their output."""
    await engine.on_device(lambda runtime: None)  # the device thread has received the pause
    async with asyncio.timeout(timeout):
        while engine.ledger()["in_flight"]:  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(0.001)
    await engine.on_device(lambda runtime: None)  # the loop has received the output of those steps


def text_request(ids: list[int] | np.ndarray, max_tokens: int = 16, n: int = 1, **rules: Any) -> Request:
    """A greedy text request unless `rules` say otherwise."""
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **rules})
    return Request(np.asarray(ids, np.int32), sampling, n=n)


async def answer(engine: Engine, request: Request) -> list[list[int]]:
    """The tokens of each choice."""
    return [[token for delta in deltas for token in delta.token_ids] for deltas in await answer_deltas(engine, request)]


async def answer_deltas(engine: Engine, request: Request) -> list[list[Delta]]:
    """Every Delta of each choice; fails if a choice ends with an error."""
    choices: list[list[Delta]] = [[] for _ in range(request.n)]
    async with engine.submit(request) as stream:
        async for delta in stream:
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            choices[delta.index].append(delta)
    return choices


def prompts(count: int, vocab: int, seed: int = 0, longest: int = 100) -> list[np.ndarray]:
    """Random prompts of 1 to `longest` tokens."""
    draw = np.random.default_rng(seed)
    return [draw.integers(2, vocab, draw.integers(1, longest + 1), dtype=np.int32) for _ in range(count)]
