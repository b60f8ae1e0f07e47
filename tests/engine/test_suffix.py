"""Suffix decoding: drafts are those of its definition, and answers are those without drafts."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest

from engine.base.drafts import DraftConfig, SuffixRules, draft_config
from engine.base.errors import ConfigError
from engine.kernels.sampling.suffix import drafted, empty_matches
from tests import drafters, suffixes, tiny
from tests.engine.test_drafts import FEW_PATHS, FEW_SETTINGS, PATHS, check, collected, drafts_of, on_path, requests_of
from tests.engine_kit import answer, running, text_request

__all__ = ["on_path"]
RULES: list[dict[str, Any]] = [{}, {"max_tree_depth": 5, "max_spec_factor": 2.5, "min_token_prob": 0.4}]


def asked(most: int, rules: dict[str, Any]) -> dict[str, Any]:
    named = {f"suffix_decoding_{name}": value for name, value in rules.items()}
    return {"method": "suffix", "num_speculative_tokens": most, **named}


def test_drafts_are_those_of_the_definition():
    draw = np.random.default_rng(0)
    found = set()
    for number in range(400):
        text = draw.integers(0, draw.integers(2, 6), draw.integers(1, 120)).astype(np.int32)
        if number % 3 == 0:
            text = np.tile(text[: max(1, len(text) // 5)], 5)
        count, depth = int(draw.integers(1, 12)), int(draw.integers(1, 10))
        factor, least = float(draw.choice([0.3, 1, 2.5])), float(draw.choice([0, 0.1, 0.5, 0.34]))
        budget = empty_matches(1, 1, depth, factor, count, "cpu").budget.tolist()
        wanted = suffixes.drafted(text.tolist(), count, depth, factor, least)
        assert drafted(text, budget, least) == wanted
        found.add(len(wanted))
    assert found == set(range(12))


@functools.cache
def text() -> tuple[int, ...]:
    """A prompt of 50 tokens that repeats itself, and the target's answer of 60 tokens."""
    model = tiny.reference(tiny.checkpoint("qwen3"))
    part = drafters.greedy(model, np.tile(np.arange(5, 14), 2).tolist(), 40)
    return tuple(drafters.greedy(model, part[-25:] * 2, 60))


def steps_of(full: list[int], prompt: int, most: int, rules: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Steps with drafts, as in tests/drafters; a step is planned before the number of its drafts is known: it has room
    for them if the step before had drafts."""
    names = {"max_tree_depth": "depth", "max_spec_factor": "factor", "min_token_prob": "least"}
    options = {names[name]: value for name, value in rules.items()}
    found, known, last, before = [], prompt + 1, len(full) - 1, 0
    for step in range(len(full)):
        if known >= last:
            break
        guesses = suffixes.drafted(full[:known], most, **options)
        several, before = before, len(guesses)
        guesses = guesses[: last - known] if several and step else []
        right = next((k for k, guess in enumerate(guesses) if guess != full[known + k]), len(guesses))
        if guesses:
            found.append((known - prompt, len(guesses), right))
        known += right + 1
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("rules", RULES, ids=["usual", "other"])
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_steps_are_those_of_the_definition(on_path, rules):
    full = list(text())
    wanted = drafters.summed(steps_of(full, 50, 6, rules))
    assert 10 < wanted[2] < wanted[1], "some drafts are wrong"
    async with running(tiny.checkpoint("qwen3"), speculative=asked(6, rules)) as own:
        (tokens,) = await answer(own, text_request(full[:50], 60, ignore_eos=True))
        assert tokens == full[50:]
        drafts = drafts_of(own)
        assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("settings", FEW_SETTINGS)
@pytest.mark.parametrize("on_path", FEW_PATHS, indirect=True)
async def test_answers_are_those_without_drafts(on_path, settings, most):
    requests = requests_of(most, 9)
    async with running(tiny.checkpoint("qwen3"), **settings) as own:
        wanted = await collected(own, requests)
    async with running(tiny.checkpoint("qwen3"), speculative=asked(most, RULES[most == 4]), **settings) as own:
        check(await collected(own, requests), wanted)
        drafts = drafts_of(own)
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"suffix_decoding_max_tree_depth": 65},
            "suffix_decoding_max_tree_depth is 65; give a whole number from 1 to 64",
        ),
        ({"suffix_decoding_max_spec_factor": -1}, "suffix_decoding_max_spec_factor is -1; give a number from 0 to 64"),
        ({"suffix_decoding_min_token_prob": "x"}, "suffix_decoding_min_token_prob is 'x'; give a number from 0 to 1"),
        ({"suffix_decoding_max_cached_requests": 9}, "drafts come from the request's own text only"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max is for method ngram"),
        (
            {"method": "ngram", "suffix_decoding_min_token_prob": 0.1},
            "suffix_decoding_min_token_prob is for method suffix",
        ),
        ({"model": "x"}, "model='x' is for a drafter; method suffix has none"),
    ],
)
def test_wrong_settings_are_refused_by_name(keys, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        draft_config({"method": "suffix", "num_speculative_tokens": 3, **keys})


def test_a_store_of_no_requests_and_no_number_of_drafts_are_the_usual_settings():
    stored = {"suffix_decoding_max_cached_requests": 0}
    assert draft_config({"method": "suffix", **stored}) == DraftConfig(16, method="suffix", suffix=SuffixRules())
