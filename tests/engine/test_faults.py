"""Faults planted in a step: which requests they end, with which errors; all other requests continue (R21, R22)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from engine import Engine, EngineConfig, FinishReason
from engine.base.errors import DeviceLostError, DeviceOutOfMemoryError, EngineError, NotReadyError, StepFailedError
from tests import tiny
from tests.engine_kit import SMALL, answer, quiet, running, text_request

QWEN3 = tiny.checkpoint("qwen3")
PROMPT = np.arange(40, 60, dtype=np.int32)
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


def model_of(engine: Engine):
    return engine.inspect().runtime.model


def plant(engine: Engine, faults: dict[int, BaseException], part: str = "forward") -> None:
    """The n-th call of the model's `part` raises faults[n]; "encode" stands for every tower of the model."""
    model, calls = model_of(engine), 0

    def breaking(real):
        def broken(*args):
            nonlocal calls
            calls += 1
            if calls in faults:
                raise faults[calls]
            return real(*args)

        return broken

    owners = {id(tower): tower for tower in model.towers.values()}.values() if part == "encode" else [model]
    for owner in owners:
        setattr(owner, part, breaking(getattr(owner, part)))


async def error_of(engine: Engine, count: int = 10) -> EngineError | None:
    """Error with which a request of `count` tokens ended."""
    last = None
    try:
        stream = engine.submit(text_request(PROMPT, count, ignore_eos=True))
    except NotReadyError as error:  # the engine died after its state was checked
        return error
    async with stream:
        async for delta in stream:
            last = delta
    assert last is not None
    assert last.finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
    return last.error


@pytest.mark.parametrize("part", ["forward", "logits"])
async def test_s39_out_of_memory_ends_its_step_with_a_word_of_its_own(part, caplog):
    async with running(QWEN3) as engine:
        wanted = await answer(engine, text_request(PROMPT, 10, ignore_eos=True))
        plant(engine, {3: OOM}, part)
        assert isinstance(await error_of(engine), DeviceOutOfMemoryError)
        await quiet(engine)
        assert await answer(engine, text_request(PROMPT, 10, ignore_eos=True)) == wanted
        assert engine.state == "ready"


@pytest.mark.parametrize(
    "faults",
    [{3: LOST}, {3: OOM, 6: OOM, 9: OOM}, {3: ValueError(), 4: ValueError(), 5: ValueError()}],
    ids=["lost", "out of memory", "in a row"],
)
async def test_a_lost_device_ends_every_request_and_the_engine(faults, caplog):
    engine = Engine(EngineConfig(model=str(QWEN3), **SMALL))
    await engine.start()
    deaths: list[BaseException] = []
    engine.on_death = deaths.append
    plant(engine, faults)
    ended = []
    while engine.state == "ready":
        ended += await asyncio.wait_for(asyncio.gather(*(error_of(engine, 6) for _ in range(3))), 60)
    assert any(isinstance(error, DeviceLostError) for error in ended)
    assert all(error is None or isinstance(error, EngineError) for error in ended)
    assert isinstance(deaths[0], DeviceLostError)
    await engine.stop(1)


async def test_mistakes_with_good_steps_between_them_end_no_other_request(caplog):
    async with running(QWEN3) as engine:
        wanted = await answer(engine, text_request(PROMPT, 5, ignore_eos=True))
        plant(engine, {call: ValueError("planted") for call in (1, 8, 15, 22, 29)})
        ended = [await error_of(engine, 5) for _ in range(20)]
        failed = [error for error in ended if error is not None]
        assert len(failed) >= 3
        assert engine.stats.failed_steps >= 3
        assert all(isinstance(error, StepFailedError) for error in failed)
        assert await answer(engine, text_request(PROMPT, 5, ignore_eos=True)) == wanted
