"""Adapters that PEFT saved, loaded from their folders and served: PEFT's own greedy tokens and log-probabilities."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.base.config import LoraConfig
from engine.lora.load import load_adapter
from engine.lora.source import Source
from engine.run.adapters import served
from tests import tiny
from tests.engine_kit import answer_deltas, prompts, running, text_request
from tests.tiny_adapters import ATTENTION, DENSE, EXPERTS, adapted

TOKENS = 8
PROMPTS = prompts(2, tiny.FIRST_SPECIAL, seed=11, longest=30)
MIXTURE = {"r": 3, "target_modules": ATTENTION, "target_parameters": EXPERTS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer and the head": ("llama", {"r": 12, "target_modules": [*DENSE, "lm_head"]}),
    "a tied head, rslora, patterns": (
        "qwen2",
        {"r": 4, "target_modules": [*DENSE, "lm_head"], "use_rslora": True, "rank_pattern": {"up_proj": 7},
         "alpha_pattern": {r"layers\.0.*": 2}},
    ),
    "joined modules": ("phi3", {"r": 5, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "qwen3_moe": ("qwen3_moe", MIXTURE),
    "mixtral": ("mixtral", MIXTURE),
    "gpt_oss": ("gpt_oss", MIXTURE),
    "minimax_m2": ("minimax_m2", MIXTURE),
}  # fmt: skip


def peft_answer(model: Any, prompt: np.ndarray) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities."""
    ids = torch.from_numpy(prompt)[None].long()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        logits = model(input_ids=made).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    tokens = made[0, len(prompt) :].tolist()
    return tokens, logits[range(TOKENS), tokens].tolist()


@pytest.mark.parametrize(("name", "settings"), CASES.values(), ids=list(CASES))
async def test_an_adapter_of_peft_answers_as_in_peft(name, settings, tmp_path):
    def make() -> list[tuple[list[int], list[float]]]:
        model = adapted(name, tmp_path, **settings)
        return [peft_answer(model, prompt) for prompt in PROMPTS]

    wanted = await asyncio.to_thread(make)
    folder: Path = tiny.checkpoint(name)
    async with running(folder, lora=LoraConfig(max_rank=64)) as engine:
        rules = (await engine.on_device(served)).rules
        adapter = load_adapter(Source(str(tmp_path)), "x", rules)

        async def answered(prompt: np.ndarray, lora: Any) -> tuple[list[int], list[float]]:
            request = replace(text_request(prompt, TOKENS, ignore_eos=True, logprobs=0), lora=lora)
            (deltas,) = await answer_deltas(engine, request)
            logprobs = [each.logprob for delta in deltas for each in delta.logprobs or ()]
            return [token for delta in deltas for token in delta.token_ids], logprobs

        base = await answered(PROMPTS[0], None)
        both = await asyncio.gather(*(answered(prompt, adapter) for prompt in PROMPTS))
        assert await answered(PROMPTS[0], None) == base
    assert [tokens for tokens, _ in both] == [tokens for tokens, _ in wanted]
    for (_, ours), (_, theirs) in zip(both, wanted):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert not np.allclose(base[1], wanted[0][1], atol=1e-2)
