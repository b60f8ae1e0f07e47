"""Idle requests: the same tokens as others, whatever takes their rows and blocks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine.base.request import IDLE, Flow
from engine.run.flows import IDLE_LINE, Outside
from tests import tiny
from tests.engine_kit import answer, prompts, quiet, running, text_request

pytestmark = pytest.mark.asyncio
QWEN3 = tiny.checkpoint("qwen3")


def idle(request):
    return replace(request, priority=IDLE, flow=Flow("batch"))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_idle_answers_are_equal_alone_and_preempted_by_others(policy):
    settings = {"max_num_seqs": 4, "num_gpu_blocks_override": 24, "scheduling_policy": policy}
    async with running(QWEN3, **settings) as engine:
        asked = [text_request(ids, 24, ignore_eos=True) for ids in prompts(12, 20, 60)]
        alone = [await answer(engine, request) for request in asked]
        before = engine.stats.preemptions
        lines = [asyncio.ensure_future(answer(engine, idle(request))) for request in asked]
        await asyncio.sleep(0.02)
        others = [asyncio.ensure_future(answer(engine, request)) for request in asked]
        assert await asyncio.gather(*others) == alone
        assert await asyncio.gather(*lines) == alone
        assert engine.stats.preemptions > before
        await quiet(engine)


async def test_idle_inputs_at_a_gate_come_after_all_others():
    outside = Outside()
    for device_id in range(4):
        outside.add(device_id, b"", IDLE_LINE + "a", device_id)
    outside.add(8, b"", "a", 8)
    outside.add(9, b"", "b", 9)
    outside.add(7, b"", IDLE_LINE + "b", 7)
    assert [entry[0] for entry in outside.first(b"", 9)] == [8, 9, 0, 7, 1, 2, 3]
    assert [entry[0] for entry in outside.first(b"", 3)] == [8, 9, 0]
    for device_id in (8, 9, 0, 1, 2, 3):
        assert outside.enter(device_id)
    assert [entry[0] for entry in outside.first(b"", 9)] == [7]
