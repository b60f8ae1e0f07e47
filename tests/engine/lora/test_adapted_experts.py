"""Experts with adapters: transformers' tokens and log-probabilities with the differences added to its parameters."""

import asyncio
import functools

import numpy as np
import pytest
import torch

from engine.base.config import LoraConfig
from tests import tiny
from tests.engine_kit import answer_deltas, prompts, running, text_request
from tests.lora_kit import Drawn, adapted, drawn, merge

# gate|up as rows, by expert, interleaved, weighed inputs; without a gate, of the hidden size and of a latent size
NAMES = ("qwen3_moe", "mixtral", "gpt_oss", "llama4", "nemotron_h", "nemotron_h-latent")
TOKENS = 8
PROMPTS = prompts(6, tiny.FIRST_SPECIAL, seed=8, longest=30)


@functools.cache
def adapters(name: str) -> tuple[Drawn | None, ...]:
    """The base, an adapter of all layers and experts, and one of experts only."""
    folder = tiny.checkpoint(name)
    return None, drawn(folder, 4, 1, scale=0.15), drawn(folder, 3, 2, ("experts",), scale=0.25)


@functools.cache
@torch.inference_mode()
def wanted(name: str) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of prompt k with adapter k % 3, and their log-probabilities."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    for number, each in enumerate(adapters(name)):
        model = tiny.reference(tiny.checkpoint(name))
        if each is not None:
            merge(model, each)
        for k in range(number, len(PROMPTS), 3):
            ids, logprobs = PROMPTS[k].tolist(), []
            for _ in range(TOKENS):
                line = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(line.argmax()))
                logprobs.append(float(line.max()))
            found[k] = ids[len(PROMPTS[k]) :], logprobs
    return [found[k] for k in range(len(PROMPTS))]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
async def test_a_batch_with_adapted_experts_equals_transformers(name, backend):
    want = await asyncio.to_thread(wanted, name)

    async def served(engine, k: int) -> tuple[list[int], list[float]]:
        asked = adapted(text_request(PROMPTS[k], TOKENS, ignore_eos=True, logprobs=0), adapters(name)[k % 3])
        (deltas,) = await answer_deltas(engine, asked)
        logprobs = [each.logprob for delta in deltas for each in delta.logprobs]
        return [token for delta in deltas for token in delta.token_ids], logprobs

    async with running(tiny.checkpoint(name), lora=LoraConfig(max_loras=2)) as engine:
        for _ in range(2):  # the second time with cached prefixes
            got = await asyncio.gather(*(served(engine, k) for k in range(len(PROMPTS))))
            assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
            for (_, mine), (_, other) in zip(got, want):
                np.testing.assert_allclose(mine, other, atol=1e-4)
