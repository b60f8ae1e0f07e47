"""Requests of several callers alternate, and a request past its deadline costs no step (SECURITY S42)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from engine import FinishReason, Request, SamplingParams
from engine.base.errors import QueueTimeoutError
from engine.base.request import Flow, PoolingParams
from engine.run.flows import Outside
from tests import tiny
from tests.engine_kit import answer, frozen, quiet, running, text_request

pytestmark = pytest.mark.asyncio

QWEN3 = tiny.checkpoint("qwen3")
ROWS = {"max_num_seqs": 1, "max_num_queued_reqs": 30}


def long_request(number: int, flow: str, weight=1, **more):
    """A prompt of 200 tokens: two such prompts cost more than one caller's turn."""
    return replace(text_request([number + 1] * 200, 1, ignore_eos=True), flow=Flow(flow, weight), **more)


async def first_tokens(engine, requests):
    """The names of the requests in the order of their first tokens; all requests wait before one starts."""
    engine.pause()
    await frozen(engine)
    seen = []

    async def follow(name, stream):
        async with stream:
            async for _ in stream:
                if name not in seen:
                    seen.append(name)

    tasks = [asyncio.ensure_future(follow(name, engine.submit(request))) for name, request in requests]
    engine.resume()
    await asyncio.gather(*tasks)
    return seen


async def test_s42_a_request_does_not_stand_behind_another_callers_crowd():
    async with running(QWEN3, **ROWS) as engine:
        crowd = [(f"a{k}", long_request(k, "a")) for k in range(12)]
        seen = await first_tokens(engine, [*crowd, ("b", long_request(20, "b"))])
        assert seen.index("b") <= 2
        assert [name for name in seen if name != "b"] == [name for name, _ in crowd]
        both = [
            (f"{flow}{k}", long_request(k, flow, weight=3 if flow == "b" else 1)) for flow in "ab" for k in range(12)
        ]
        seen = await first_tokens(engine, both)
        assert sum(name[0] == "b" for name in seen[:12]) in (8, 9, 10)  # a weight of 3 to 1: three in four
        assert engine.ledger()["flows"] == 0


async def test_s42_a_request_whose_deadline_has_passed_costs_no_step():
    async with running(QWEN3, **ROWS) as engine:
        engine.pause()
        await frozen(engine)
        late = engine.submit(replace(text_request(range(5, 25), 4, n=3), deadline=time.monotonic() - 1.0))
        open_ended = asyncio.ensure_future(answer(engine, text_request(range(5, 25), 4)))
        while engine.ledger()["live_rows"] < 2:  # noqa: ASYNC110 (the inbox is drained on another thread)
            await asyncio.sleep(0.001)
        engine.resume()
        errors = {}
        async with late:
            async for delta in late:
                assert not delta.token_ids
                errors[delta.index] = delta.error
        assert sorted(errors) == [0, 1, 2]
        assert all(isinstance(error, QueueTimeoutError) for error in errors.values())
        assert len((await open_ended)[0]) == 4
        assert engine.stats.prompt_tokens == 20  # of the other request
        await quiet(engine)


async def test_s42_a_deadline_that_comes_later_ends_nothing():
    async with running(QWEN3, **ROWS) as engine:
        soon = replace(text_request(range(5, 25), 40, ignore_eos=True), deadline=time.monotonic() + 30.0)
        assert len((await answer(engine, soon))[0]) == 40


async def test_what_waits_at_a_gate_takes_turns_by_caller():
    outside = Outside()
    for device_id in range(100):
        outside.add(device_id, b"", "a", device_id)
    for device_id in (200, 201):
        outside.add(device_id, b"", "b", device_id)
    assert [entry[0] for entry in outside.first(b"", 5)] == [0, 200, 1, 201, 2]
    assert outside.enter(0)
    assert [entry[0] for entry in outside.first(b"", 5)] == [200, 1, 201, 2, 3]  # a's turn is over
    assert outside.discard(200)
    assert not outside.enter(200)
    assert 201 in outside
    assert outside.enter(201)
    assert [entry[0] for entry in outside.first(b"", 2)] == [1, 2]
    assert len(outside) == 99


async def test_inputs_of_another_caller_do_not_stand_behind_a_crowd_of_inputs():
    pools = {"runner": "pooling", "max_model_len": 128, "max_num_seqs": 2, "max_num_queued_reqs": 2}
    async with running(QWEN3, **pools) as engine:
        engine.pause()
        await frozen(engine)
        seen = []

        async def follow(name, request):
            async with engine.submit(request) as stream:
                async for delta in stream:
                    assert delta.finish_reason is FinishReason.STOP
                    seen.append(name)

        tasks = [asyncio.ensure_future(follow(name, pooled(count, name))) for name, count in (("a", 60), ("b", 2))]
        await asyncio.sleep(0)
        engine.resume()
        await asyncio.gather(*tasks)
        assert len(seen) == 62
        assert seen.index("b") < 12
        await quiet(engine)


def pooled(count: int, flow: str) -> Request:
    ids, once = np.arange(10 * count, dtype=np.int32) % 250, SamplingParams(max_tokens=1)
    return Request(ids, once, n=count, pooling=PoolingParams(np.arange(count + 1) * 10), flow=Flow(flow))
