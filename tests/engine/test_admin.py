"""Operations on a running engine: pausing, resuming, and resetting its caches."""

import asyncio

import pytest

from engine import Engine, EngineConfig
from engine.base.errors import NotReadyError
from engine.base.request import FinishReason
from tests import tiny
from tests.engine_kit import SMALL, answer, answer_deltas, frozen, running, text_request

QWEN3 = tiny.checkpoint("qwen3")
PROMPT = list(range(5, 45))


async def test_a_paused_engine_plans_nothing_and_goes_on_where_it_was():
    async with running(QWEN3) as engine:
        whole = await answer(engine, text_request(PROMPT, 40))
        tokens: list[int] = []
        async with engine.submit(text_request(PROMPT, 40)) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) == 10:
                    break
            engine.pause()
            assert engine.is_paused
            await frozen(engine)
            steps = engine.stats.steps
            waiting = engine.submit(text_request(PROMPT, 4))
            await asyncio.sleep(0.05)
            assert engine.stats.steps == steps
            engine.resume()
            async for delta in stream:
                tokens += delta.token_ids
        assert [tokens] == whole
        assert [token async for delta in waiting for token in delta.token_ids] == whole[0][:4]


async def test_a_paused_engine_still_lets_requests_leave_and_stops():
    async with running(QWEN3) as engine:
        engine.pause()
        stream = engine.submit(text_request(PROMPT, 40))
        await asyncio.sleep(0.02)
        stream.abort()
        assert [delta.finish_reason async for delta in stream] == [FinishReason.ABORT]


async def test_a_paused_engine_that_stops_finishes_what_is_open():
    engine = Engine(EngineConfig(model=str(QWEN3), **SMALL))
    await engine.start()
    engine.pause()
    stream = engine.submit(text_request(PROMPT, 4, ignore_eos=True))
    await engine.stop(10)
    assert [delta.finish_reason async for delta in stream][-1] is FinishReason.LENGTH


async def test_cached_prefixes_are_forgotten_only_while_nothing_runs():
    async with running(QWEN3) as engine:
        await answer(engine, text_request(PROMPT, 2))
        async with engine.submit(text_request(PROMPT, 400, ignore_eos=True)) as stream:
            assert (await anext(stream)).cached_tokens == 32
            assert not await engine.reset_prefix_cache()
        for _ in range(100):
            if await engine.reset_prefix_cache():
                break
            await asyncio.sleep(0.01)
        assert (await answer_deltas(engine, text_request(PROMPT, 2)))[0][0].cached_tokens == 0
        assert engine.ledger()["cached"] > 0
        assert await engine.reset_encoder_cache()


async def test_a_stopped_engine_refuses_operations():
    async with running(QWEN3) as engine:
        pass
    with pytest.raises(NotReadyError):
        await engine.reset_prefix_cache()
