"""Drafts on a GPU: each method drafts what the same drafter drafts in plain torch, and no answer changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import tiny
from tests.engine import test_dflash, test_draft_model, test_drafter, test_drafts_states
from tests.engine.test_drafter import PROMPTS, counts, expected
from tests.engine.test_drafts import SETTINGS, collected, drafts_of, ngram, requests_of
from tests.engine_kit import running, text_request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
ON_CARD = {"device": "cuda", "dtype": "float32"}
TARGET = test_drafter.TARGET


@pytest.mark.parametrize("form", ["flat", "speculators", "flat-layers", "speculators-parallel"])
async def test_heads_draft_as_in_plain_torch(form):
    async with running(tiny.checkpoint(TARGET), speculative=test_drafter.asked(3, form), **ON_CARD) as own:
        for number in range(2):
            assert await counts(own, number) == expected(number, 3, form)


@pytest.mark.parametrize("form", ["flat", "sliding", "causal"])
async def test_block_drafters_draft_as_in_torch(form):
    async with running(tiny.checkpoint(TARGET), speculative=test_dflash.asked(5, form), **ON_CARD) as own:
        await test_dflash.check_counts(own, 0, 5, form)


async def test_draft_models_draft_as_in_transformers():
    async with running(tiny.checkpoint(TARGET), speculative=test_draft_model.asked(3), **ON_CARD) as own:
        assert await test_draft_model.counts(own, 0) == test_draft_model.expected(0, 3)


def speculative_of(method: str) -> dict[str, Any]:
    own = {"eagle": test_drafter.asked(4), "block": test_dflash.asked(4), "model": test_draft_model.asked(4)}
    return own.get(method) or {**ngram(4), "method": method}


async def same_answers(folder: Any, speculative: dict[str, Any], settings: dict[str, Any], seed: int = 4) -> None:
    """Greedy answers are those without drafts but for near ties; the second time prefixes are cached."""
    requests = [one for one in requests_of(seed, 28, 60) if one.sampling.temperature == 0 and one.n == 1]
    requests += [text_request(ids, 30, ignore_eos=True) for ids in PROMPTS[:2]]
    settings = {**settings, **ON_CARD}
    async with running(folder, **settings) as own:
        wanted = await collected(own, requests)
    async with running(folder, speculative=speculative, **settings) as own:
        for _ in range(2):
            found = await collected(own, requests)
            same = [a[0][0] == b[0][0] and a[0][2] == b[0][2] for a, b in zip(found, wanted, strict=True)]
            assert sum(same) >= len(same) - 1, same
        drafts = drafts_of(own)
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "chunks", "pressure", "few-rows"])
@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle", "block", "model"])
async def test_answers_are_those_without_drafts(method, settings):
    await same_answers(tiny.checkpoint(TARGET), speculative_of(method), settings)


async def test_answers_of_state_layers_are_those_without_drafts():
    await same_answers(tiny.checkpoint(test_drafts_states.NAME), ngram(4), test_drafts_states.ROOM)
