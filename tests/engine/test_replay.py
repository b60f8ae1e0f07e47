"""Recorded answers as drafts: equal answers, exact step counts on every path, and recordings that are refused."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.base.drafts import draft_config
from engine.base.errors import ConfigError
from tests import drafters, tiny
from tests.drafters import PROMPTS
from tests.engine.test_drafts import PATHS, drafts_of, on_path
from tests.engine.test_synthetic_drafts import expected
from tests.engine_kit import answer, running, text_request

__all__ = ["on_path"]
TARGET, COUNT = "qwen3", 40


@functools.cache
def text(number: int) -> list[int]:
    """The target's greedy answer to a prompt."""
    return drafters.greedy(tiny.reference(tiny.checkpoint(TARGET)), PROMPTS[number], COUNT)[len(PROMPTS[number]) :]


def written(folder: Path, *lines: Any) -> str:
    path = folder / "recording.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def recorded(number: int) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPTS[number], "token_ids": text(number)}


def asked(path: str, **more: Any) -> dict[str, Any]:
    fixed = {"num_speculative_tokens": 3, "enable_adaptive_verification": False}
    return {"method": "replay", "replay_file": path, **fixed, **more}


async def check_counts(folder: Path, rates: list[float] | None, *asks: tuple[int, int]) -> None:
    """The steps and drafts of answers, by the numbers of their prompts and their seeds."""
    path = written(folder, recorded(0), recorded(1))
    more = {} if rates is None else {"synthetic_acceptance_rates": rates}
    async with running(tiny.checkpoint(TARGET), speculative=asked(path, **more)) as own:
        for number, seed in asks:
            before = drafts_of(own).counts[:3]
            (tokens,) = await answer(own, text_request(PROMPTS[number], COUNT, seed=seed, ignore_eos=True))
            assert tokens == text(number)
            found = tuple(now - then for now, then in zip(drafts_of(own).counts[:3], before))
            assert found == expected(seed, COUNT, rates or [1.0] * 3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rates", [None, [0, 0, 0], [1, 0, 0], [1, 1, 0], [0.9, 0.6, 0.2]])
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_recorded_answers_are_right_as_often_as_is_set(on_path, rates, tmp_path):
    await check_counts(tmp_path, rates, (0, 3), (1, 4), (0, 5))


async def test_requests_on_a_cpu_have_draws_of_their_own(tmp_path):
    assert len({expected(seed, COUNT, [0.9, 0.6, 0.2]) for seed in (3, 4)}) == 2
    await check_counts(tmp_path, [0.9, 0.6, 0.2], (0, 3), (1, 4))


async def test_prompts_that_are_not_recorded_have_no_drafts(tmp_path):
    async with running(tiny.checkpoint(TARGET), speculative=asked(written(tmp_path, recorded(0)))) as own:
        (tokens,) = await answer(own, text_request(PROMPTS[1], COUNT, ignore_eos=True))
        assert tokens == text(1)
        assert drafts_of(own).counts[:3] == (0, 0, 0)
        (tokens,) = await answer(own, text_request(PROMPTS[0], COUNT + 20, ignore_eos=True))  # longer than recorded
        assert tokens[:COUNT] == text(0)
        assert drafts_of(own).num_accepted_tokens > 20


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no line; a line is a recorded answer"),
        ([{"prompt_token_ids": [5]}], "line 1: Object missing required field `token_ids`; lines are"),
        ([{"prompt_token_ids": [5], "token_ids": ["a"]}], "line 1: Expected `int`, got `str`"),
        ([{"prompt_token_ids": [5], "token_ids": [320]}], "line 1: token 320; the model has tokens 0 to 319"),
    ],
)
async def test_a_wrong_recording_is_refused_by_line(lines, words, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(words)):
        async with running(tiny.checkpoint(TARGET), speculative=asked(written(tmp_path, *lines))):
            pass


async def test_a_missing_recording_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"replay_file='.*none' cannot be read: No such file or directory"):
        async with running(tiny.checkpoint(TARGET), speculative=asked(str(tmp_path / "none"))):
            pass


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"replay_file": None}, "replay_file is missing; give the path of the recorded answers"),
        ({"method": "ngram"}, "replay_file is for method replay; leave it out"),
        ({"rejection_sample_method": "synthetic"}, "method replay itself sets how many drafts are right"),
        ({"synthetic_acceptance_length": 4.5}, "synthetic_acceptance_length is 4.5; give a number from 1 to 4"),
        ({"model": "x"}, "model='x' is for a drafter; method replay has none"),
        ({"prompt_lookup_min": 2}, "prompt_lookup_min is for method ngram"),
    ],
)
def test_wrong_settings_are_refused_by_name(more, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        draft_config(asked("x", **more))
