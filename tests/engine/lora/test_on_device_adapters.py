"""Adapters on a real GPU, float32: the tokens of a CPU, in graphs, in chunks, over few places, and with equal bits."""

import asyncio
from dataclasses import replace

import pytest
import torch

from engine import Request
from engine.base.config import LoraConfig
from tests import tiny
from tests.engine_kit import answer, answer_deltas, prompts, text_request
from tests.invariance.devices import Answer, Device
from tests.lora_kit import Drawn, adapted, drawn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
NAMES = ("qwen3", "gemma2", "qwen3_moe", "gpt_oss")
PROMPTS = prompts(16, tiny.FIRST_SPECIAL, seed=6, longest=60)
CUDA = Device("cuda")


def adapters(name: str) -> tuple[Drawn | None, ...]:
    folder = tiny.checkpoint(name)
    return (
        None,
        drawn(folder, 8, 1, scale=0.15),
        drawn(folder, 3, 2, scale=0.15),
        drawn(folder, 16, 3, ("o_proj",), 0.3),
    )


def asked(name: str, **rules) -> list[Request]:
    """Prompt k with adapter k % 4."""
    of = adapters(name)
    return [adapted(text_request(prompt, 16, ignore_eos=True, **rules), of[k % 4]) for k, prompt in enumerate(PROMPTS)]


async def on_cpu(name: str) -> list[Answer]:
    async with Device("cpu").running(tiny.checkpoint(name), lora=LoraConfig(max_loras=3)) as engine:
        return [await CUDA.alone(engine, each) for each in asked(name, **CUDA.rules)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 9}, {"lora": LoraConfig(max_loras=2)}])
async def test_a_batch_has_the_tokens_of_a_cpu(name, settings):
    want = await on_cpu(name)
    async with CUDA.running(tiny.checkpoint(name), **{"lora": LoraConfig(max_loras=3), **settings}) as engine:
        for _ in range(3):
            got = await asyncio.gather(*(answer(engine, each) for each in asked(name)))
            CUDA.check([tokens for (tokens,) in got], want, name)


async def test_rows_of_the_base_keep_their_bits_alongside_rows_with_adapters():
    async def logprobs(engine, requests: list[Request]) -> list[list[float]]:
        found = await asyncio.gather(*(answer_deltas(engine, each) for each in requests))
        return [[each.logprob for delta in choice for each in delta.logprobs] for (choice,) in found]

    requests = asked("qwen3", logprobs=0)
    base, mixed = [each for each in requests if each.lora is None], requests
    async with CUDA.running(tiny.checkpoint("qwen3"), lora=LoraConfig(max_loras=3), deterministic=True) as engine:
        alone = await logprobs(engine, base)
        mixed_rows = await logprobs(engine, mixed)
        plain = await logprobs(engine, [replace(each, lora=None) for each in base])
    assert [mixed_rows[k] for k in range(0, len(mixed), 4)] == alone == plain
