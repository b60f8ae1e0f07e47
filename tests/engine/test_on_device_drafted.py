"""Engines with drafts on a real GPU: answers are those without drafts, set acceptance gives exact step counts, and
nothing is compiled after the start.

Answers have equal bits with `deterministic` only.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests import tiny
from tests.block_drafters import Form as BlockForm
from tests.block_drafters import folder_of
from tests.drafters import PROMPTS, Form, eagle3
from tests.engine.test_drafts import check, collected, drafts_of, ngram, requests_of
from tests.engine.test_on_device_steady import CUDA, nothing_new
from tests.engine.test_replay import asked, recorded, text, written
from tests.engine.test_synthetic_drafts import FIXED, counts, expected
from tests.engine_kit import answer, text_request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
TARGET = "qwen3"
EXACT = {"deterministic": True}
ALL = {"enable_adaptive_verification": False}
DRAFTS: dict[str, Any] = {
    "ngram": lambda: ngram(4),
    "suffix": lambda: {"method": "suffix"},
    "eagle3": lambda: {"model": str(eagle3(TARGET)), "num_speculative_tokens": 3},
    "eagle3-layers": lambda: {"model": str(eagle3(TARGET, Form(layers=2, joins=False))), "num_speculative_tokens": 3},
    "peagle": lambda: {"model": str(eagle3(TARGET, Form(parallel=True))), "num_speculative_tokens": 3},
    "dflash": lambda: {"model": str(folder_of(TARGET, BlockForm())), "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("kind", DRAFTS)
async def test_answers_are_those_without_drafts(kind, adaptive):
    requests = requests_of(5, 32, 60)
    async with CUDA.running(tiny.checkpoint(TARGET), **EXACT) as own:
        wanted = await collected(own, requests)
    speculative = DRAFTS[kind]() | ({} if adaptive else ALL)
    async with CUDA.running(tiny.checkpoint(TARGET), speculative=speculative, **EXACT) as own:
        check(await collected(own, requests), wanted)
        check(await collected(own, requests), wanted)  # prefixes are cached now
        assert adaptive or drafts_of(own).num_accepted_tokens > 0


@pytest.mark.parametrize("kind", DRAFTS)
async def test_nothing_is_compiled_after_the_start(kind, monkeypatch):
    async with CUDA.running(tiny.checkpoint(TARGET), speculative={**DRAFTS[kind](), **ALL}) as own:
        requests = [text_request([5, 6, 7] * 9, 30, ignore_eos=True, temperature=n % 2, seed=n) for n in range(12)]
        with nothing_new(monkeypatch):
            await asyncio.gather(*[answer(own, each) for each in requests])
        assert drafts_of(own).num_drafts > 0


@pytest.mark.parametrize("rates", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.9, 0.6, 0.2]])
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
async def test_drafts_count_as_often_as_is_set(kind, rates):
    speculative = {**DRAFTS[kind](), "synthetic_acceptance_rates": rates, **FIXED}
    async with CUDA.running(tiny.checkpoint(TARGET), speculative=speculative, dtype="bfloat16") as own:
        for seed in (3, 4):
            assert await counts(own, seed, 40) == expected(seed, 40, rates)


async def test_recorded_answers_are_right_as_often_as_is_set(tmp_path):
    """Greedy answers of the CPU, in float32, are those of the device."""
    rates = [0.9, 0.6, 0.2]
    speculative = asked(written(tmp_path, recorded(0)), synthetic_acceptance_rates=rates)
    async with CUDA.running(tiny.checkpoint(TARGET), speculative=speculative, **EXACT) as own:
        (tokens,) = await answer(own, text_request(PROMPTS[0], 40, seed=3, ignore_eos=True))
        assert tokens == text(0)
        assert drafts_of(own).counts[:3] == expected(3, 40, rates)
