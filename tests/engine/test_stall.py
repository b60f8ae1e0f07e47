"""A device that never answers is given up after a time, and its requests get errors (S41). A late step is not lost."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import engine.run.start
from engine import Engine, EngineConfig, FinishReason
from engine.base.config import FailureLimits
from engine.base.errors import DeviceLostError, NotReadyError
from engine.base.stall import StallWatch
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator, HostLauncher
from tests.engine_kit import SMALL, answer, running, text_request

QWEN3 = tiny.checkpoint("qwen3")
PROMPT = np.arange(40, 60, dtype=np.int32)


def block(engine: Engine, at: int, until: threading.Event) -> None:
    """Makes the `at`-th forward from now wait."""
    model, calls = engine.inspect().runtime.model, 0
    real = model.forward

    def waiting(*args):
        nonlocal calls
        calls += 1
        if calls == at:
            until.wait(20)
        return real(*args)

    model.forward = waiting


async def test_a_step_that_never_ends_answers_everybody_and_ends_the_engine(caplog):
    settings = {"step_timeout": 0.2, "failures": FailureLimits(stall_exit=0.3)}
    served = Engine(EngineConfig(model=str(QWEN3), **SMALL, **settings))
    await served.start()
    deaths: list[BaseException] = []
    served.on_death = deaths.append
    go = threading.Event()
    block(served, 3, go)
    begun = time.monotonic()
    async with served.submit(text_request(PROMPT, 10, ignore_eos=True)) as stream:
        deltas = [delta async for delta in stream]
    assert 0.4 < time.monotonic() - begun < 10
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert isinstance(deltas[-1].error, DeviceLostError)
    assert served.state == "dead"
    with pytest.raises(NotReadyError):
        served.submit(text_request(PROMPT, 10))
    go.set()  # the step returns after all: it emits nothing, and no error is reported twice
    await asyncio.sleep(0.1)
    assert len(deaths) == 1
    assert isinstance(deaths[0], DeviceLostError)
    await served.stop(1)


async def test_a_step_that_comes_home_late_is_not_lost(caplog):
    async with running(QWEN3, step_timeout=0.1) as served:
        wanted = await answer(served, text_request(PROMPT, 10, ignore_eos=True))
        go = threading.Event()
        block(served, 3, go)
        asyncio.get_running_loop().call_later(0.5, go.set)
        assert await answer(served, text_request(PROMPT, 10, ignore_eos=True)) == wanted
        assert "has not ended in" in caplog.text
        assert served.state == "ready"


async def test_tokens_that_an_accelerator_brought_home_late_are_taken(monkeypatch, caplog):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    async with running(QWEN3) as served:
        wanted = await answer(served, text_request(PROMPT, 10, ignore_eos=True))
        waits = []
        # Like Launcher.wait: returns False once, for a step whose tokens are there but came too late.
        monkeypatch.setattr(HostLauncher, "wait", lambda self, record, timeout: waits.append(record) or len(waits) != 3)
        assert await answer(served, text_request(PROMPT, 10, ignore_eos=True)) == wanted
        assert served.state == "ready"


async def test_only_time_in_which_the_loop_looked_counts():
    stalls: list[float] = []
    config = EngineConfig(model="", step_timeout=0.2, failures=FailureLimits(stall_exit=0.2))
    watched = SimpleNamespace(config=config, last_beat=1.0, on_stall=stalls.append)
    watch = StallWatch(watched)
    time.sleep(0.5)  # noqa: ASYNC251 - the loop must not run
    await asyncio.sleep(0.05)
    assert not stalls
    for _ in range(6):
        await asyncio.sleep(0.1)
        watched.last_beat += 1
    assert not stalls
    async with asyncio.timeout(60):
        while not stalls:  # noqa: ASYNC110 (the watch has no event)
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert len(stalls) == 1
    watch.close()
