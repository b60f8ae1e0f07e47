"""Acceptance that an operator sets: exact step counts on every path, and settings that are refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from _fast.layout import SlotWord
from engine.base.drafts import draft_config
from engine.base.errors import ConfigError
from engine.kernels.sampling.noise import fraction_reference
from engine.kernels.sampling.surviving import STREAM, surviving_reference
from engine.kernels.step_tensors import empty_slots
from tests import tiny
from tests.block_drafters import Form, folder_of
from tests.drafters import eagle3, summed
from tests.engine.test_drafts import ONE_PATH, PATHS, collected, drafts_of, ngram, on_path
from tests.engine_kit import answer, running, text_request

__all__ = ["on_path"]
TARGET = "qwen3"
FIXED = {"enable_adaptive_verification": False, "rejection_sample_method": "synthetic"}
DRAFTERS = {"eagle3": lambda: eagle3(TARGET), "dflash": lambda: folder_of(TARGET, Form())}


def chance(seed: int, place: int) -> float:
    return float(fraction_reference(seed, place, torch.zeros(1, dtype=torch.int64), STREAM))


def expected(seed: int, count: int, rates: list[float]) -> tuple[int, int, int]:
    """Steps with drafts, drafts, and right drafts of an answer of so many tokens."""
    found, known = [], 2  # two steps are in flight before the first run is read
    while known < count - 1:
        drafts = min(len(rates), count - 1 - known)
        right = min(drafts, sum(chance(seed, known) < rate for rate in rates))
        found.append((known, drafts, right))
        known += right + 1
    return summed(found)


async def counts(own: Any, seed: int, count: int) -> tuple[int, int, int]:
    """The same of an answer of the server."""
    before = drafts_of(own).counts[:3]
    (tokens,) = await answer(own, text_request([5, 9, 11, 200, 7], count, seed=seed, ignore_eos=True))
    assert len(tokens) == count
    return tuple(now - then for now, then in zip(drafts_of(own).counts[:3], before))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rates", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.9, 0.6, 0.2]], ids=["all", "none", "some"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_drafts_count_as_often_as_is_set(on_path, drafter, rates):
    asked = {"model": str(DRAFTERS[drafter]()), "num_speculative_tokens": 3, "synthetic_acceptance_rates": rates}
    async with running(tiny.checkpoint(TARGET), speculative={**asked, **FIXED}, enable_prefix_caching=False) as own:
        for seed in (3, 4):
            assert await counts(own, seed, 40) == expected(seed, 40, rates)


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_rules_and_reports_go_with_the_drafts_that_count(on_path, caplog):
    """Penalties count the drafts, choices differ in their draws; the start says that answers are made up."""
    requests = [
        text_request(np.tile(np.arange(5, 14), 4), 30, ignore_eos=True, seed=n, frequency_penalty=0.4, temperature=0.8)
        for n in range(3)
    ]
    asked = {"model": str(eagle3(TARGET)), "num_speculative_tokens": 4, "synthetic_acceptance_length": 3, **FIXED}
    with caplog.at_level("WARNING"):
        async with running(tiny.checkpoint(TARGET), speculative=asked) as own:
            first = await collected(own, requests)
            assert await collected(own, requests) == first
            assert drafts_of(own).num_accepted_tokens > 20
    assert "answers are NOT the model's" in caplog.text


@pytest.mark.parametrize("on_path", PATHS[2:], indirect=True)
async def test_reported_probabilities_are_those_of_the_answer(on_path):
    """A draft that is forced has none, so rows with log-probabilities have no drafts."""
    asked = {"model": str(eagle3(TARGET)), "num_speculative_tokens": 3, "synthetic_acceptance_length": 3, **FIXED}
    async with running(tiny.checkpoint(TARGET), speculative=asked) as own:
        (((tokens, entries, _),),) = await collected(own, [text_request([5, 9, 11], 12, ignore_eos=True, logprobs=1)])
        assert [entry[0] for entry in entries] == tokens
        assert drafts_of(own).counts[:3] == (0, 0, 0)


def test_the_number_of_right_drafts_has_the_frequencies_that_are_set():
    slots = empty_slots(2000, 1, 1, "cpu", 3)
    slots.seed[:] = torch.arange(2001)
    rates = torch.tensor([0.8, 0.5, 0.05])
    found = surviving_reference(slots, torch.arange(2000), torch.arange(2000) % 7, rates)
    shares = [(found > place).float().mean().item() for place in range(3)]
    assert shares == pytest.approx(rates.tolist(), abs=0.03)
    assert int(slots.word(SlotWord.LENGTH).sum()) == 0


@pytest.mark.parametrize(("mean", "most"), [(1, 3), (3.0, 3), (4, 3), (5.0, 7)])
def test_a_mean_is_the_sum_of_its_survivals(mean, most):
    found = draft_config(ngram(most, synthetic_acceptance_length=mean, rejection_sample_method="synthetic"))
    assert found is not None
    assert len(found.forced) == most
    assert 1 + sum(found.forced) == pytest.approx(mean, abs=1e-6)
    assert list(found.forced) == sorted(found.forced, reverse=True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rejection_sample_method": "lossy"}, "rejection_sample_method is 'lossy'; give 'standard' or 'synthetic'"),
        ({"synthetic_acceptance_length": 2}, "synthetic_acceptance_length is for rejection_sample_method 'synthetic'"),
        (
            {"rejection_sample_method": "synthetic"},
            "give synthetic_acceptance_length or synthetic_acceptance_rates too",
        ),
        (
            {"synthetic_acceptance_length": 0.5, **FIXED},
            "synthetic_acceptance_length is 0.5; give a number from 1 to 4",
        ),
        ({"synthetic_acceptance_length": 5, **FIXED}, "synthetic_acceptance_length is 5; give a number from 1 to 4"),
        ({"synthetic_acceptance_length": True, **FIXED}, "synthetic_acceptance_length is True"),
        (
            {"synthetic_acceptance_rates": [0.5, 0.4], **FIXED},
            "synthetic_acceptance_rates is [0.5, 0.4]; give 3 numbers",
        ),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1], **FIXED}, "none above the one before"),
        ({"synthetic_acceptance_rates": [0.5, 0.4, -0.1], **FIXED}, "synthetic_acceptance_rates is [0.5, 0.4, -0.1]"),
        ({"synthetic_acceptance_rates": 0.5, **FIXED}, "synthetic_acceptance_rates is 0.5; give 3 numbers from 0 to 1"),
        (
            {"synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 2, **FIXED},
            "synthetic_acceptance_length and synthetic_acceptance_rates both set",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(more, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        draft_config(ngram(3, **more))


def test_files_that_decide_the_number_of_drafts_need_it_for_a_mean():
    given = {"model": "x", "synthetic_acceptance_length": 2, **FIXED}
    with pytest.raises(ConfigError, match="synthetic_acceptance_length needs the number of drafts"):
        draft_config(given)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("on_path", PATHS[1:2], indirect=True)
async def test_a_drafter_may_have_random_weights(on_path, drafter):
    asked = {"model": str(DRAFTERS[drafter]()), "num_speculative_tokens": 3, "synthetic_acceptance_length": 4}
    settings = {"speculative": {**asked, **FIXED}, "load_format": "dummy"}
    async with running(tiny.checkpoint(TARGET), **settings) as own:
        assert await counts(own, 1, 20) == expected(1, 20, [1.0] * 3)
