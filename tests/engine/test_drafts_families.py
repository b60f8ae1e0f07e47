"""Drafts with every kind of layer: windows, sinks, experts, soft caps, states. Answers equal those without drafts."""

import numpy as np
import pytest

import engine.run.start
from tests import tiny, tiny_states
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_drafts import check, collected, drafts_of, ngram
from tests.engine_kit import running, text_request

SHORT = ("llama4", "mistral-window", "mamba")
NAMES = [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.full)
    for name in sorted((*tiny.CHECKPOINTS, *tiny_states.STATES))
]
# A model that may choose few tokens repeats itself: many drafts are right. Log-probabilities are those of all tokens.
FEW = {"allowed_token_ids": (5, 9, 14), "logprobs": 1}
RULES = [FEW, FEW | {"temperature": 0.7, "seed": 3}, {"logprobs": 1}]


@pytest.mark.covering(1)
@pytest.mark.parametrize("device", ["device", "cpu"])
@pytest.mark.parametrize("name", NAMES)
async def test_answers_of_every_family_are_those_without_drafts(name, device, monkeypatch):
    draw = np.random.default_rng(3)
    asked = []
    for k in range(9):
        ids = np.tile(draw.integers(2, tiny.FIRST_SPECIAL, 3 + k), 9)[: 20 + 5 * k].astype(np.int32)
        asked.append(text_request(ids, 30, ignore_eos=True, **RULES[k % len(RULES)]))
    if device == "device":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    settings = {"max_num_batched_tokens": 64, "encoder_cache_tokens": 64}
    async with running(tiny.checkpoint(name), **settings) as own:
        wanted = await collected(own, asked)
    async with running(tiny.checkpoint(name), speculative=ngram(3), **settings) as own:
        check(await collected(own, asked), wanted)
        assert drafts_of(own).num_accepted_tokens > 40
