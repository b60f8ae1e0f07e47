"""A text request gives the same greedy tokens whatever the scheduler does: single circumstances and pairs of them.

Every case compares with the tokens of the prompt served alone by an engine without chunks, prefix cache or preemption.
Those tokens are compared with transformers' own.
"""

import asyncio
import functools

import numpy as np
import pytest

from engine import Request
from tests import tiny
from tests.engine_kit import answer, answer_deltas, prompts, quiet, text_request
from tests.invariance.devices import Answer, Device
from tests.models.test_decoders import greedy

NAMES = ("llama", "mistral-window", "qwen2", "qwen3", "omni")
TOKENS = 24
PROMPTS = prompts(32, tiny.FIRST_SPECIAL, seed=7, longest=90)
CPU = Device("cpu")


@functools.cache
def answers(name: str, device: Device) -> list[Answer]:
    """The answer of each prompt, served one at a time, without a prefix cache."""

    async def run() -> list[Answer]:
        async with device.running(tiny.checkpoint(name), enable_prefix_caching=False) as engine:
            return [await device.alone(engine, request(prompt, **device.rules)) for prompt in PROMPTS]

    return asyncio.run(run())


def alone(name: str) -> list[list[int]]:
    """The tokens of each prompt, served one at a time on the CPU."""
    return [each.tokens for each in answers(name, CPU)]


def request(prompt: np.ndarray, n: int = 1, **rules) -> Request:
    return text_request(prompt, TOKENS, n=n, ignore_eos=True, **rules)


async def all_at_once(engine, count: int = 32) -> list[list[int]]:
    got = await asyncio.gather(*[answer(engine, request(prompt)) for prompt in PROMPTS[:count]])
    return [choices[0] for choices in got]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_alone_equals_transformers(name, device):
    own = answers(name, device)[:6]
    device.check([greedy(name, prompt.tolist(), TOKENS) for prompt in PROMPTS[:6]], own)


@pytest.mark.parametrize("name", NAMES)
async def test_batched_with_31_others(name, device):
    wanted = await asyncio.to_thread(answers, name, device)
    async with device.running(tiny.checkpoint(name)) as engine:
        device.check(await all_at_once(engine), wanted)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", NAMES)
async def test_chunked(name, chunk, device):
    wanted = await asyncio.to_thread(answers, name, device)
    count = 6 if chunk == 1 else 32
    async with device.running(tiny.checkpoint(name), max_prefill_chunk=chunk) as engine:
        device.check(await all_at_once(engine, count), wanted[:count])


@pytest.mark.parametrize("name", NAMES)
async def test_small_budget_mixes_prefill_and_decode(name, device):
    wanted = await asyncio.to_thread(answers, name, device)
    async with device.running(tiny.checkpoint(name), max_num_batched_tokens=40, max_num_seqs=8) as engine:
        device.check(await all_at_once(engine), wanted)


@pytest.mark.parametrize("name", NAMES)
async def test_prefix_cached(name, device):
    wanted = await asyncio.to_thread(answers, name, device)
    async with device.running(tiny.checkpoint(name)) as engine:
        for turn in range(2):
            got = [(await answer(engine, request(prompt)))[0] for prompt in PROMPTS[:10]]
            device.check(got, wanted[:10], f"turn {turn}")
        assert engine.stats.prefix_hits > 0
        # A longer prompt that begins like an answered prompt reuses the blocks of that prompt.
        prompt = np.concatenate([PROMPTS[0], np.asarray(wanted[0].tokens, np.int32)])
        longer = (await answer(engine, request(prompt)))[0]
    async with device.running(tiny.checkpoint(name), enable_prefix_caching=False) as engine:
        device.check([longer], [await device.alone(engine, request(prompt, **device.rules))])


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", NAMES)
async def test_preempted_in_the_middle(name, cache, device):
    wanted = await asyncio.to_thread(answers, name, device)
    async with device.running(
        tiny.checkpoint(name), num_gpu_blocks_override=24, max_model_len=160, enable_prefix_caching=cache
    ) as engine:
        device.check(await all_at_once(engine), wanted)
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("cache", [True, False])
async def test_several_choices_share_the_prompt_and_agree(cache, device):
    wanted = await asyncio.to_thread(answers, "qwen3", device)
    async with device.running(tiny.checkpoint("qwen3"), enable_prefix_caching=cache) as engine:
        for prompt, each in zip(PROMPTS[:8], wanted):
            device.check(await answer(engine, request(prompt, n=5)), [each] * 5)


@pytest.mark.parametrize("settings", [{"num_gpu_blocks_override": 24, "max_model_len": 160}, {"max_prefill_chunk": 7}])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
async def test_poisoned_memory_changes_nothing(name, settings, device):
    """No step reads unwritten blocks or blocks that have left a sliding window."""
    wanted = await asyncio.to_thread(answers, name, device)
    async with device.running(tiny.checkpoint(name), debug_poison=True, **settings) as engine:
        for _ in range(2):
            device.check(await all_at_once(engine), wanted)
            await quiet(engine)


async def test_seeded_draws_do_not_depend_on_company_chunks_or_pressure(device):
    rules = {"temperature": 1.0, "top_p": 0.9, "top_k": 40}
    folder = tiny.checkpoint("qwen3")
    async with device.running(folder, enable_prefix_caching=False, **device.exact) as engine:
        wanted = [(await answer(engine, request(p, **rules, seed=k)))[0] for k, p in enumerate(PROMPTS[:12])]
    for settings in ({}, {"max_prefill_chunk": 7}, {"num_gpu_blocks_override": 24, "max_model_len": 160}):
        async with device.running(folder, **settings, **device.exact) as engine:
            got = await asyncio.gather(
                *[answer(engine, request(p, **rules, seed=k)) for k, p in enumerate(PROMPTS[:12])]
            )
            assert [choices[0] for choices in got] == wanted, settings


async def test_neighbours_that_leave_change_nothing(device):
    wanted = await asyncio.to_thread(answers, "llama", device)

    async def leave(prompt: np.ndarray, after: int) -> None:
        async with engine.submit(request(prompt)) as stream:
            seen = 0
            async for delta in stream:
                seen += len(delta.token_ids)
                if seen >= after:
                    return

    async with device.running(tiny.checkpoint("llama"), num_gpu_blocks_override=40, max_model_len=160) as engine:
        leavers = [asyncio.create_task(leave(prompt, k % 5)) for k, prompt in enumerate(PROMPTS[16:])]
        got = await asyncio.gather(*[answer(engine, request(prompt)) for prompt in PROMPTS[:16]])
        await asyncio.gather(*leavers)
        device.check([choices[0] for choices in got], wanted[:16])


async def test_priorities_change_the_order_not_the_tokens(device):
    wanted = await asyncio.to_thread(answers, "qwen3", device)
    async with device.running(tiny.checkpoint("qwen3"), scheduling_policy="priority", max_num_seqs=2) as engine:
        done: list[int] = []

        async def one(k: int) -> None:
            base = request(PROMPTS[k])
            sent = Request(base.prompt_token_ids, base.sampling, priority=-k)
            device.check(await answer(engine, sent), [wanted[k]])
            done.append(k)

        await asyncio.gather(*[one(k) for k in range(12)])
        assert done.index(11) < done.index(3)


@pytest.mark.parametrize("name", NAMES)
async def test_not_a_bit_of_the_log_probabilities_depends_on_circumstances(name, device):
    """Other requests, chunks, cached prefixes and preemption change no bit; `deterministic` is set where needed."""
    folder, rules = tiny.checkpoint(name), {"logprobs": 5}

    async def collected(engine, prompt: np.ndarray) -> list:
        deltas = (await answer_deltas(engine, request(prompt, **rules)))[0]
        return [entry for delta in deltas for entry in delta.logprobs or ()]

    async with device.running(folder, enable_prefix_caching=False, **device.exact) as engine:
        wanted = [await collected(engine, prompt) for prompt in PROMPTS[:12]]
    assert all(len(entries) == TOKENS for entries in wanted)
    for settings in ({}, {"max_prefill_chunk": 7}, {"num_gpu_blocks_override": 24, "max_model_len": 160}):
        async with device.running(folder, **settings, **device.exact) as engine:
            for turn in range(2):  # the second time from the prefix cache
                others = [asyncio.ensure_future(answer(engine, request(prompt))) for prompt in PROMPTS[12:]]
                got = await asyncio.gather(*[collected(engine, prompt) for prompt in PROMPTS[:12]])
                await asyncio.gather(*others)
                assert got == wanted, (settings, turn)
