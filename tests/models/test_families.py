"""Every family of text decoders in an engine: the tokens of transformers, whatever the scheduler does; old configs."""

import asyncio

import pytest

from engine.cache.layout import CacheLayout
from tests import tiny
from tests.engine_kit import answer, running, text_request
from tests.models.test_decoders import greedy, load, prompt

LENGTHS, TOKENS, LONGEST, CHUNK = (60, 23, 40), 16, 80, 11


@pytest.mark.parametrize("name", tiny.FAMILIES)
async def test_tokens_of_a_busy_engine_equal_transformers(name):
    """In a mixed batch, in chunks, preempted and computed again, and from the prefix cache."""
    prompts = [prompt(length, seed=9) for length in LENGTHS]
    want = [await asyncio.to_thread(greedy, name, tokens, TOKENS) for tokens in prompts]
    folder = tiny.checkpoint(name)
    one = CacheLayout(load(folder).cache_specs(), 16).blocks_for(LONGEST, CHUNK)  # more than one row, less than three
    settings = {"max_model_len": LONGEST, "max_prefill_chunk": CHUNK, "num_gpu_blocks_override": one + max(1, one // 3)}
    async with running(folder, **settings) as engine:
        for _ in range(2):
            sent = [answer(engine, text_request(tokens, TOKENS, ignore_eos=True)) for tokens in prompts]
            assert [choices[0] for choices in await asyncio.gather(*sent)] == want
        assert engine.stats.preemptions > 0
        assert engine.stats.prefix_hits > 0
