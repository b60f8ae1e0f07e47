"""A step runs out of device memory: which requests start over, which end; no request's tokens change (S39, R22).

Each case runs on the CPU's and on the device's executor (tests/engine/host_accelerator). The planted fault is the error
that torch raises. The next step has already been launched by then, on values that were never written.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import engine.run.start
from engine import Delta, Engine, FinishReason, Request
from engine.base.config import FailureLimits
from engine.base.errors import DeviceOutOfMemoryError
from engine.base.failures import SMALLER_STEPS, TokenBudget
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_faults import OOM, plant
from tests.engine_kit import answer, prompts, running, text_request
from tests.invariance.devices import Device

QWEN3 = tiny.checkpoint("qwen3")
PROMPTS = prompts(8, tiny.FIRST_SPECIAL, seed=5, longest=150)
RULES = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"bad_words": ((7,), (30, 31)), "logprobs": 3},
    {"prompt_logprobs": 2},
)


@pytest.fixture(params=["host", "device"])
def freed(request, monkeypatch):
    """Number of times that memory was freed; the CPU's executor caches no memory."""
    device = HostAccelerator()
    if request.param == "device":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: device)
    return (lambda: device.freed) if request.param == "device" else (lambda: None)


def requests() -> list[Request]:
    """Plain, sampled and ruled rows, with one or several choices."""
    return [
        text_request(ids, 12, n=1 + number % 3, ignore_eos=True, **RULES[number % len(RULES)])
        for number, ids in enumerate(PROMPTS)
    ]


async def collected(engine: Engine, request: Request) -> list[list[Delta]]:
    """All deltas of each choice, its end included."""
    choices: list[list[Delta]] = [[] for _ in range(request.n)]
    async with engine.submit(request) as stream:
        async for delta in stream:
            choices[delta.index].append(delta)
    return choices


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def details_of(deltas: list[Delta]) -> list[object]:
    """Log-probabilities, of prompts too, rounded to the precision that sums have in different batches."""
    entries = [entry for delta in deltas for entry in (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))]
    return [entry and (entry.token_id, round(entry.logprob, 3)) for entry in entries]


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 9, 14])
async def test_rows_without_news_start_over_and_nothing_is_emitted_twice(freed, at, cache, caplog):
    settings = {"max_num_batched_tokens": 96, "max_num_seqs": 16, "enable_prefix_caching": cache}
    async with running(QWEN3, **settings) as engine:
        wanted = [await collected(engine, request) for request in requests()]
        assert await engine.reset_prefix_cache()
        plant(engine, {at: OOM})
        got = await asyncio.gather(*[collected(engine, request) for request in requests()])
        assert engine.stats.failed_steps == 1
        assert freed() in (1, None)
        for choice, whole in zip((each for one in got for each in one), (each for one in wanted for each in one)):
            if choice[-1].finish_reason is FinishReason.ERROR:
                assert isinstance(choice[-1].error, DeviceOutOfMemoryError)
                assert 0 < len(tokens_of(choice)) < len(tokens_of(whole))
                assert tokens_of(choice) == tokens_of(whole)[: len(tokens_of(choice))]
            else:
                assert tokens_of(choice) == tokens_of(whole)
                assert details_of(choice) == details_of(whole)
        ended = sum(choice[-1].finish_reason is FinishReason.ERROR for one in got for choice in one)
        assert ended == 0 if at == 1 else ended > 0 or at < 6, "by the sixth step some had their first token"


@pytest.mark.parametrize("number", range(6))
async def test_the_counts_of_a_row_start_over_as_well(freed, number, caplog):
    rules = {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "logprobs": 2}
    async with running(QWEN3) as engine:
        request = text_request(PROMPTS[number], 24, ignore_eos=True, **rules)
        wanted = await collected(engine, request)
        assert await engine.reset_prefix_cache()
        plant(engine, {1: OOM})
        got = await collected(engine, request)
        assert engine.stats.failed_steps == 1
    assert tokens_of(got[0]) == tokens_of(wanted[0])
    assert details_of(got[0]) == details_of(wanted[0])


async def test_a_row_that_runs_out_of_memory_twice_ends(freed, caplog):
    async with running(QWEN3, failures=FailureLimits(oom=9)) as engine:
        request = text_request(PROMPTS[0], 5, ignore_eos=True)
        wanted = await answer(engine, request)
        # Call 2 belongs to the step after the first, which was already launched.
        plant(engine, {1: OOM, 3: OOM, 4: OOM})
        ended = (await collected(engine, request))[0][-1]
        assert isinstance(ended.error, DeviceOutOfMemoryError)
        assert engine.stats.preemptions == 1
        assert await answer(engine, request) == wanted


async def test_the_next_step_may_fail_as_well(freed, caplog):
    async with running(QWEN3, failures=FailureLimits(oom=9)) as engine:
        request = text_request(PROMPTS[0], 5, ignore_eos=True)
        wanted = await answer(engine, request)
        plant(engine, {1: OOM, 2: OOM})
        assert await answer(engine, request) == wanted
        assert await engine.reset_prefix_cache()
        plant(engine, {1: OOM, 2: ValueError("planted")})
        assert await answer(engine, request) == wanted


async def test_rows_may_leave_before_they_start_over(freed, caplog):
    async with running(QWEN3, max_num_batched_tokens=32) as engine:
        plant(engine, {2: OOM})
        failed = asyncio.Event()
        engine.on_step = lambda stats: stats.failed and failed.set()
        streams = [engine.submit(request) for request in requests()]
        await failed.wait()
        for stream in streams:
            stream.abort()
        answers = await asyncio.gather(*[collected(engine, request) for request in requests()])
        assert all(choice[-1].finish_reason is FinishReason.LENGTH for one in answers for choice in one)


@pytest.mark.parametrize("part", ["forward", "encode"])
async def test_media_are_encoded_again(freed, part, caplog):
    pytest.importorskip("av")
    from tests.invariance.test_media import MIXES, make_request

    async with running(tiny.checkpoint("omni"), encoder_cache_tokens=512, max_model_len=1024) as engine:
        sent = [await make_request(names) for names in list(MIXES.values())[:4]]
        wanted = [await answer(engine, request) for request in sent]
        await engine.reset_prefix_cache()
        await engine.reset_encoder_cache()
        plant(engine, {1: OOM}, part)
        assert await asyncio.gather(*[answer(engine, request) for request in sent]) == wanted


async def test_steps_are_half_as_large_for_a_while(freed, caplog):
    async with running(QWEN3, max_num_batched_tokens=64, max_num_seqs=8, enable_prefix_caching=False) as engine:
        seen = []
        engine.on_step = seen.append
        request = text_request(np.arange(40, 190, dtype=np.int32), 1)
        plant(engine, {1: OOM})
        for _ in range(3 + SMALLER_STEPS // 5):
            await answer(engine, request)
        sizes = [stats.num_tokens for stats in seen]
    failed = next(k for k, stats in enumerate(seen) if stats.failed)
    after = sizes[failed + 2 :]  # the next step had already been planned
    assert set(after[:5]) == {32, 22}
    assert max(after[: SMALLER_STEPS - 2]) == 32
    assert max(after[SMALLER_STEPS:]) == 64


def test_a_budget_is_whole_again_after_a_hundred_steps():
    budget = TokenBudget(2048)
    assert budget.of(0) == 2048
    assert budget.halve(10) == 1024
    assert [budget.of(step) for step in (10, 109, 110)] == [1024, 1024, 2048]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("at", [1, 2, 5])
async def test_rows_start_over_on_an_accelerator(at, caplog):
    settings = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_batched_tokens": 96}
    async with Device("cuda").running(QWEN3, **settings, **Device("cuda").exact) as served:
        sent = [text_request(ids, 12, ignore_eos=True) for ids in PROMPTS]
        wanted = [(await answer(served, request))[0] for request in sent]
        plant(served, {at: OOM})
        got = await asyncio.gather(*[collected(served, request) for request in sent])
        assert served.stats.failed_steps == 1
    for (choice,), whole in zip(got, wanted):
        count = len(tokens_of(choice))
        assert tokens_of(choice) == whole[:count]
        assert count == 12 or (count and isinstance(choice[-1].error, DeviceOutOfMemoryError))
