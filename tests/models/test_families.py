"""Every family of text decoders in an engine: transformers' tokens under any scheduling; old configurations."""

import asyncio
from pathlib import Path

import pytest

import engine.run.start
from engine.cache.layout import CacheLayout
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, text_request
from tests.invariance.devices import Answer, Device
from tests.models.test_decoders import greedy, load, prompt

MECHANISMS = (  # families that together have every mechanism that Llama's layers lack
    "gemma2", "gemma3", "phi3-short", "granite", "glm4", "olmo3", "cohere-norms", "smollm3", "exaone4", "ministral3",
    "stablelm-parallel", "nemotron", "apertus", "hunyuan", "gpt_neox", "gpt2",
    "lfm2",
)  # fmt: skip
ON_DEVICE = [
    "gemma3",
    "gemma4",
    "gemma4-large",
    "ministral3",
    "cohere-norms",
    "apertus",
    "hunyuan",
    "gpt2",
    "qwen2_moe",
    "llama4",
    "lfm2-biased",
    "lfm2_moe",
]
LENGTHS, TOKENS, LONGEST, CHUNK = (60, 23, 40), 16, 80, 11
PROMPTS = [prompt(length, seed=9) for length in LENGTHS]


def settings(folder: Path) -> dict[str, int]:
    """Settings of an engine whose cache has room for more than one row and less than three."""
    one = CacheLayout(load(folder).cache_specs(), 16).blocks_for(LONGEST, CHUNK)
    return {"max_model_len": LONGEST, "max_prefill_chunk": CHUNK, "num_gpu_blocks_override": one + max(1, one // 3)}


async def check_busy(folder: Path, device: Device, want: list[Answer]) -> None:
    """Checks tokens in a mixed batch, in chunks, preempted and recomputed, and from the prefix cache."""
    async with device.running(folder, **settings(folder)) as engine:
        for turn in range(2):
            sent = [answer(engine, text_request(tokens, TOKENS, ignore_eos=True)) for tokens in PROMPTS]
            device.check([choices[0] for choices in await asyncio.gather(*sent)], want, f"{folder.name}, turn {turn}")
        assert engine.stats.preemptions > 0
        for _ in range(2):  # the second time from the prefix cache: no other request takes blocks
            again = await answer(engine, text_request(PROMPTS[0], TOKENS, ignore_eos=True))
            device.check(again, want[:1], folder.name)
        assert engine.stats.prefix_hits > 0


def transformers_tokens(name: str) -> list[Answer]:
    return [Answer(greedy(name, tokens, TOKENS)) for tokens in PROMPTS]


@pytest.mark.parametrize("name", tiny.FAMILIES)
async def test_tokens_of_a_busy_engine_equal_transformers(name):
    await check_busy(tiny.checkpoint(name), Device("cpu"), await asyncio.to_thread(transformers_tokens, name))


@pytest.mark.parametrize("name", ON_DEVICE)
async def test_so_do_tokens_of_an_accelerators_steps(name, monkeypatch):
    """The tokens are equal in an accelerator's padded steps and recorded graphs, on CPU tensors."""
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    await check_busy(tiny.checkpoint(name), Device("cpu"), await asyncio.to_thread(transformers_tokens, name))
