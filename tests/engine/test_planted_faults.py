"""Faults at every point of a step: which rows they reach, and that the next steps are unaffected (R21, R22)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from engine import Engine, EngineConfig, FinishReason
from engine.base.config import FailureLimits
from engine.base.errors import (
    DeviceLostError,
    DeviceOutOfMemoryError,
    EngineError,
    InvalidLogitsError,
    StepFailedError,
)
from engine.base.faults import KINDS, STEP, Fault, Faults
from server.ops.canary import Canary
from tests import tiny
from tests.engine_kit import SMALL, answer, quiet, running, text_request

QWEN3 = tiny.checkpoint("qwen3")
POISON = 97
PROMPTS = [np.array([POISON if k == 3 else 10 + k, *range(20, 26 + k)], np.int32) for k in range(8)]


async def ended(engine: Engine, prompt: np.ndarray, count: int = 12) -> tuple[list[int], EngineError | None]:
    """A request's tokens, and the error that ended it."""
    tokens: list[int] = []
    async with engine.submit(replace(text_request(prompt, count, ignore_eos=True), cache_salt=b"own")) as stream:
        async for delta in stream:
            tokens += delta.token_ids
            if delta.finish_reason is FinishReason.ERROR:
                return tokens, delta.error
    return tokens, None


async def all_ended(engine: Engine) -> list[tuple[list[int], EngineError | None]]:
    return await asyncio.gather(*(ended(engine, prompt) for prompt in PROMPTS))


@pytest.fixture(scope="module")
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def engine(faults):
    """A running engine; after each test faults are cleared and the engine must be idle."""
    async with running(QWEN3, faults=faults, enable_prefix_caching=False, failures=FailureLimits(oom=100)) as engine:
        yield engine
        faults.clear()


async def test_s38_a_row_that_is_spoilt_at_any_point_ends_alone(engine, faults):
    calm = [tokens for tokens, _ in await all_ended(engine)]
    for point in STEP:
        faults.arm(Fault(point, "nan", token=POISON))
        found = await all_ended(engine)
        assert isinstance(found[3][1], InvalidLogitsError), point
        assert [tokens for k, (tokens, _) in enumerate(found) if k != 3] == [t for k, t in enumerate(calm) if k != 3]
        assert faults.happened[f"{point} nan"] == 1
        await quiet(engine)
    assert [tokens for tokens, _ in await all_ended(engine)] == calm


@pytest.mark.parametrize(("kind", "error"), [("raise", StepFailedError), ("oom", DeviceOutOfMemoryError)])
async def test_s38_a_step_that_raises_at_any_point_reaches_its_own_rows(engine, faults, kind, error):
    calm = [tokens for tokens, _ in await all_ended(engine)]
    for point in STEP:
        faults.arm(Fault(point, kind, token=POISON))
        for (tokens, failed), wanted in zip(await all_ended(engine), calm):
            assert failed is None or isinstance(failed, error), point
            assert tokens == (wanted if failed is None else wanted[: len(tokens)])
        assert faults.happened[f"{point} {kind}"] == 1
        await quiet(engine)
        assert [tokens for tokens, _ in await all_ended(engine)] == calm
    assert engine.stats.failed_steps == len(STEP)


@pytest.mark.parametrize("point", STEP)
async def test_s40_a_device_that_is_lost_at_any_point_answers_everybody_once(point):
    faults = Faults()
    engine = Engine(EngineConfig(model=str(QWEN3), **SMALL, faults=faults))
    await engine.start()
    try:
        faults.arm(Fault(point, "lost", token=POISON))
        found = await all_ended(engine)
        assert all(error is None or isinstance(error, DeviceLostError) for _, error in found)
        assert isinstance(found[3][1], DeviceLostError)
        assert engine.state == "dead"
    finally:
        await engine.stop(0)


async def test_s41_a_canary_notices_an_engine_that_turns_and_does_not_answer(faults, caplog):
    async with running(QWEN3, faults=faults, step_timeout=0.2) as engine:
        canary = Canary(engine, 0.0)
        await canary.ask()
        assert (canary.late, canary.wrong, canary.answered) == (False, 0, 1)
        faults.arm(Fault("forward", "hang", seconds=20.0))
        await canary.ask()
        assert canary.late
        faults.clear()
        await quiet(engine)
        await canary.ask()
        assert (canary.late, canary.wrong, canary.answered) == (False, 0, 2)
        canary.right.token += 1
        await canary.ask()
        await canary.ask()
        assert (canary.late, canary.wrong) == (False, 2)
        assert len((await answer(engine, text_request([5, 6, 7], 4)))[0]) == 4


def test_unknown_points_and_kinds_are_refused():
    for point, kind in (("forward", "crash"), ("nowhere", "raise"), ("disk", "nan")):
        with pytest.raises(ValueError, match="at '"):
            Faults().arm(Fault(point, kind))
    assert set(STEP) < KINDS.keys()
