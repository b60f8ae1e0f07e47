"""Models with states return the same greedy tokens for every schedule and every set of cached states.

As in test_text, each case compares with the tokens of the prompt alone, from an engine without chunks, prefix cache or
memory pressure. A further test compares these tokens with transformers.
"""

import asyncio
import functools

import numpy as np
import pytest
import torch
import transformers

from engine import Request
from engine.base.config import StateConfig
from engine.cache.layout import CacheLayout
from engine.layers.states import set_states
from engine.models.registry import build_model, load_model_config
from tests import tiny
from tests.engine_kit import answer, answer_deltas, prompts, quiet, text_request
from tests.invariance.devices import Answer, Device
from tests.models.seeing import oracle

NAMES = (
    "qwen3_5_text-states",
    "mamba2",
    pytest.param("nemotron_h-states", marks=pytest.mark.full),
    pytest.param("jamba-states", marks=pytest.mark.full),
)
MODES = ("none", "align", "all")
FURTHER = ("align", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("none", "all")))
TOKENS = 20
PROMPTS = prompts(12, tiny.FIRST_SPECIAL, seed=7, longest=90)
MANY = {"num_gpu_blocks_override": 3000}  # room for the states of every prompt
CPU = Device("cpu")


def request(prompt: np.ndarray, n: int = 1, **rules) -> Request:
    return text_request(prompt, TOKENS, n=n, ignore_eos=True, **rules)


@functools.cache
def answers(name: str, device: Device) -> list[Answer]:
    """Each prompt's answer, one request at a time, without a prefix cache."""

    async def run() -> list[Answer]:
        async with device.running(tiny.checkpoint(name), enable_prefix_caching=False) as engine:
            return [await device.alone(engine, request(prompt, **device.rules)) for prompt in PROMPTS]

    return asyncio.run(run())


def few(name: str, device: Device, exact: bool = False) -> dict[str, int]:
    """Settings of an engine with memory for the states of three rows and a few tokens."""
    model = build_model(load_model_config(tiny.checkpoint(name)), torch.float32, device.name, None)
    set_states(model, StateConfig(), device.name == "cpu", exact=exact)
    runs = CacheLayout(model.cache_specs(), 16).runs
    assert runs is not None
    return {"num_gpu_blocks_override": 3 * runs.row_blocks + 12, "max_model_len": 160}


@functools.cache
def long_answers(name: str, device: Device) -> list[Answer]:
    """As `answers`, for the first 40 tokens of each prompt and answers of 60 tokens."""

    async def run() -> list[Answer]:
        async with device.running(tiny.checkpoint(name), enable_prefix_caching=False) as engine:
            asked = [text_request(prompt[:40], 60, ignore_eos=True, **device.rules) for prompt in PROMPTS]
            return [await device.alone(engine, each) for each in asked]

    return asyncio.run(run())


async def all_at_once(engine, count: int = len(PROMPTS)) -> list[list[int]]:
    got = await asyncio.gather(*[answer(engine, request(prompt)) for prompt in PROMPTS[:count]])
    return [choices[0] for choices in got]


@torch.inference_mode()
def greedy(name: str, prompt: list[int], count: int = TOKENS) -> list[int]:
    """Greedy tokens of transformers."""
    model, ids = oracle(name), torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_alone_equals_transformers(name, device):
    if name == "mamba2" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("this transformers normalises all channels together; published models normalise each group")
    own = answers(name, device)[:3]
    device.check([greedy(name, prompt.tolist()) for prompt in PROMPTS[:3]], own)


@pytest.mark.parametrize(
    "settings", [{"max_prefill_chunk": 1}, {"max_prefill_chunk": 7}, {"max_prefill_chunk": 64}, {}]
)
@pytest.mark.parametrize("name", NAMES)
async def test_together_in_chunks(name, settings, device):
    wanted = await asyncio.to_thread(answers, name, device)
    count = 3 if settings.get("max_prefill_chunk") == 1 else len(PROMPTS)
    async with device.running(tiny.checkpoint(name), debug_poison=True, **settings) as engine:
        device.check(await all_at_once(engine, count), wanted[:count])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
async def test_prefixes_are_found_by_states(name, mode, device):
    """Sends each prompt twice, then the prompt, its answer and more, as a conversation's next turn."""
    wanted = await asyncio.to_thread(answers, name, device)
    states = StateConfig(mode=mode, every=16)
    async with device.running(tiny.checkpoint(name), states=states, debug_poison=True, **MANY) as engine:
        for turn in range(2):
            got = [(await answer(engine, request(prompt)))[0] for prompt in PROMPTS[:8]]
            device.check(got, wanted[:8], f"turn {turn}")
        assert (engine.stats.prefix_hits > 0) == (mode != "none")
        longer = [np.concatenate([p, np.asarray(a.tokens, np.int32)]) for p, a in zip(PROMPTS[:4], wanted)]
        later = [(await answer(engine, request(prompt)))[0] for prompt in longer]
    async with device.running(tiny.checkpoint(name), enable_prefix_caching=False) as engine:
        device.check(later, [await device.alone(engine, request(prompt, **device.rules)) for prompt in longer])


@pytest.mark.parametrize("mode", FURTHER)
@pytest.mark.parametrize("name", [each for each in NAMES if each != "mamba2"])  # rows of mamba2 never grow
async def test_preempted_in_the_middle(name, mode, device):
    """Short prompts, long answers: three rows' tokens outgrow the memory that their states leave."""
    folder, asked = tiny.checkpoint(name), [text_request(prompt[:40], 60, ignore_eos=True) for prompt in PROMPTS]
    wanted = await asyncio.to_thread(long_answers, name, device)
    settings = {**few(name, device), "states": StateConfig(mode=mode, every=16), "debug_poison": True}
    async with device.running(folder, **settings) as engine:
        for _ in range(2):
            got = await asyncio.gather(*[answer(engine, each) for each in asked])
            device.check([choices[0] for choices in got], wanted)
            await quiet(engine)
        assert engine.stats.preemptions > 0


async def test_several_choices_share_the_prompt_and_agree(device):
    wanted = await asyncio.to_thread(answers, "qwen3_5_text-states", device)
    async with device.running(tiny.checkpoint("qwen3_5_text-states")) as engine:
        for prompt, each in zip(PROMPTS[:4], wanted):
            device.check(await answer(engine, request(prompt, n=5)), [each] * 5)


async def test_neighbours_that_leave_change_nothing(device):
    wanted = await asyncio.to_thread(answers, "qwen3_5_text-states", device)

    async def leave(prompt: np.ndarray, after: int) -> None:
        async with engine.submit(request(prompt)) as stream:
            received = 0
            async for delta in stream:
                received += len(delta.token_ids)
                if received >= after:
                    return

    async with device.running(
        tiny.checkpoint("qwen3_5_text-states"), num_gpu_blocks_override=200, max_model_len=160
    ) as engine:
        leavers = [asyncio.create_task(leave(prompt, k % 5)) for k, prompt in enumerate(PROMPTS[6:])]
        got = await asyncio.gather(*[answer(engine, request(prompt)) for prompt in PROMPTS[:6]])
        await asyncio.gather(*leavers)
        device.check([choices[0] for choices in got], wanted[:6])


@pytest.mark.parametrize("name", NAMES)
async def test_not_a_bit_of_the_log_probabilities_depends_on_circumstances(name, device):
    """Other rows, chunks, cached prefixes and memory pressure change no bit; `deterministic` is set where needed."""
    folder, rules = tiny.checkpoint(name), {"logprobs": 5}

    async def collected(engine, prompt: np.ndarray) -> list:
        deltas = (await answer_deltas(engine, request(prompt, **rules)))[0]
        return [entry for delta in deltas for entry in delta.logprobs or ()]

    async with device.running(folder, enable_prefix_caching=False, **device.exact) as engine:
        wanted = [await collected(engine, prompt) for prompt in PROMPTS[:5]]
    for settings in ({}, {"max_prefill_chunk": 7}, few(name, device, exact=True)):
        async with device.running(folder, **settings, **device.exact) as engine:
            for turn in range(2):  # the second turn uses the prefix cache
                others = [asyncio.ensure_future(answer(engine, request(prompt))) for prompt in PROMPTS[5:]]
                got = await asyncio.gather(*[collected(engine, prompt) for prompt in PROMPTS[:5]])
                await asyncio.gather(*others)
                assert got == wanted, (settings, turn)
