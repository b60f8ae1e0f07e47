"""An error during the admission of a request ends this request and releases what it has taken (S27, S38)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import engine.run.start
from engine import Delta, Engine, FinishReason, MediaInput, Request, SamplingParams
from engine.base.errors import AdmissionError, DeviceLostError
from engine.base.inbox import Abort, Submit
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_engine import runtime_of
from tests.engine_kit import answer, quiet, running, text_request

QWEN3, OMNI = tiny.checkpoint("qwen3"), tiny.checkpoint("omni")
PROMPT = np.arange(40, 60, dtype=np.int32)
LOST = RuntimeError("CUDA error: an illegal memory access was encountered")
POINTS = [
    ("encoder", "find"), ("_scheduler", "add_entry"), ("encoder", "stage"), ("_scheduler", "add"),
    ("_executor", "admit"),
]  # fmt: skip


@pytest.fixture(params=["host", "device"])
def executor(request, monkeypatch):
    """The CPU's executor, and the device's executor on the CPU."""
    if request.param == "device":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())


class Faulty:
    """Wraps a part of the admission; the next call of `name` raises, before or after the real call."""

    def __init__(self, real: Any, name: str, error: BaseException, after: bool) -> None:
        self._real, self._name, self._error, self._after = real, name, error, after

    def __len__(self) -> int:
        return len(self._real)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name != self._name or self._error is None:
            return real

        def broken(*args: Any, **more: Any) -> Any:
            if self._after:
                real(*args, **more)
            error, self._error = self._error, None
            raise error

        return broken


def plant(engine: Engine, part: str, name: str, error: BaseException, after: bool = False) -> None:
    owner = runtime_of(engine).media if part == "encoder" else runtime_of(engine).admission
    setattr(owner, part, Faulty(getattr(owner, part), name, error, after))


def picture(tag: bytes) -> Request:
    pad = tiny.IDS["<|IMAGE|>"]
    item = MediaInput("image", tag * 16, ((1, 4),), 4, {"pixel_values": np.zeros((3, 5), np.float32)})
    return Request(np.array([1, pad, pad, pad, pad, 2], np.int32), SamplingParams(max_tokens=4), media=(item,))


async def ends(engine: Engine, request: Request) -> list[Delta]:
    """The last Delta of each choice."""
    last: dict[int, Delta] = {}
    async with engine.submit(request) as stream:
        async for delta in stream:
            last[delta.index] = delta
    return [last[choice] for choice in range(request.n)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("error", [ValueError("planted"), MemoryError()], ids=["value", "memory"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("part", "name"), POINTS, ids=[name for _, name in POINTS])
async def test_an_error_at_any_point_ends_one_request_and_leaves_nothing(executor, part, name, after, error, caplog):
    if after and part == "_scheduler":
        pytest.skip("the scheduler raises before it takes anything, or gives back what it took")
    async with running(OMNI, encoder_cache_tokens=64) as engine:
        alone = await answer(engine, text_request(PROMPT, 30, ignore_eos=True))
        before = await quiet(engine)
        neighbour = asyncio.ensure_future(answer(engine, text_request(PROMPT, 30, ignore_eos=True)))
        await asyncio.sleep(0.02)
        plant(engine, part, name, error, after)
        (end,) = await ends(engine, picture(b"a"))
        assert end.finish_reason is FinishReason.ERROR
        assert isinstance(end.error, AdmissionError)
        assert await neighbour == alone
        held = await quiet(engine)
        changed = {key for key in held if held[key] != before[key]} - {"free", "cached", "index_entries", "inbox"}
        assert not {key for key in changed if "bytes" not in key}, (before, held)
        assert engine.state == "ready"
        assert len(runtime_of(engine).admission.fresh) == 0


@pytest.mark.parametrize("cache", [True, False])
async def test_each_choice_that_cannot_be_admitted_ends(cache, caplog):
    async with running(QWEN3, enable_prefix_caching=cache) as engine:
        plant(engine, "_executor", "admit", ValueError("planted"))
        found = await ends(engine, text_request(PROMPT, 5, n=3, ignore_eos=True))
        failed = [delta.finish_reason is FinishReason.ERROR for delta in found]
        assert failed == ([True] * 3 if cache else [True, False, False])
        await quiet(engine)


async def test_a_sibling_that_cannot_be_admitted_ends_alone(caplog):
    async with running(QWEN3) as engine:
        stream = engine.submit(text_request(PROMPT, 5, n=2, ignore_eos=True))
        await engine.on_device(lambda _: plant(engine, "_executor", "admit", ValueError("planted")) or True)
        last = {}
        async with stream:
            async for delta in stream:
                last[delta.index] = delta
        assert last[0].finish_reason is FinishReason.LENGTH
        assert isinstance(last[1].error, AdmissionError)
        await quiet(engine)


async def test_a_row_that_cannot_start_over_ends(caplog):
    from tests.engine.test_faults import OOM
    from tests.engine.test_faults import plant as plant_in_step

    async with running(QWEN3) as engine:
        plant_in_step(engine, {1: OOM})
        stream = engine.submit(text_request(PROMPT, 5, ignore_eos=True))
        await engine.on_device(lambda _: plant(engine, "_executor", "admit", ValueError("planted")) or True)
        async with stream:
            deltas = [delta async for delta in stream]
        assert isinstance(deltas[-1].error, AdmissionError)
        await quiet(engine)
        assert len(await answer(engine, text_request(PROMPT, 5, ignore_eos=True))) == 1


async def test_a_message_that_fails_harms_no_other_request(caplog):
    async with running(QWEN3) as engine:
        neighbour = asyncio.ensure_future(answer(engine, text_request(PROMPT, 30, ignore_eos=True)))
        await asyncio.sleep(0.02)
        stream = engine.submit(text_request(PROMPT, 100, ignore_eos=True))
        await anext(stream)
        plant(engine, "_executor", "reset", ValueError("planted"))
        stream.abort()
        engine.inspect().inbox.put(Abort(None))
        engine.inspect().inbox.put(Submit(None, 7))
        assert len((await neighbour)[0]) == 30
        await quiet(engine)
        assert engine.state == "ready"


async def test_a_lost_device_at_admission_ends_every_request(caplog):
    async with running(QWEN3) as engine:
        plant(engine, "_executor", "admit", LOST)
        (end,) = await ends(engine, text_request(PROMPT, 5))
        assert isinstance(end.error, DeviceLostError)
        assert engine.state == "dead"
