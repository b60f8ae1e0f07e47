"""Rows under grammars with drafts: answers are those without drafts, and masks are filled along the drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import engine.run.start
from engine.base.request import FinishReason
from engine.step.parts.drafts import Drafts
from tests import block_drafters, drafters, tiny
from tests.drafters import Form
from tests.engine import test_drafts
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine.test_drafts import ONE_PATH, PATHS, check_twice, collected, drafts_of, ngram, on_path
from tests.engine.test_grammar_rows import FOLDER, JSON, PROMPTS, TOKENIZER, WORD, A, Z, asked, grammar
from tests.engine_kit import quiet, running

__all__ = ["on_path"]
LONG = grammar('start: ("x yes, no; " | "ab")*')
LIST = grammar('start: "[" /[0-3]/ (", " /[0-3]/)* "]"')
THINK = tiny.IDS["<|vision_eos|>"]
# A model that may choose few tokens repeats itself, so many drafts are right.
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.7, "min_tokens": 12, "logit_bias": ((A, 2.0),)},
    {"temperature": 0.0, "bad_words": ((Z,),)},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.4, "top_p": 0.9, "presence_penalty": 0.2, "logprobs": 1},
]


def requests_of(seed: int, count: int) -> list[Any]:
    """Random requests under grammars that are awake, asleep until a token or for a number of tokens, or both."""
    draw = np.random.default_rng(seed)
    free = grammar("", "free", starts=(THINK,), budget=5)
    woken = tuple(draw.integers(30, 60, 3).tolist())
    held = [
        JSON, LONG, LIST, WORD, grammar('start: "yes" | "no no no"', starts=woken), free,
        grammar('start: ("abc" | "xy")+', starts=(THINK,), budget=4),
        grammar("start: /[a-c ]+/", starts=(THINK,), opens=(THINK, woken[0])), LONG, LONG, LIST,
    ]  # fmt: skip
    found = []
    for number in range(count):
        part = PROMPTS[number % len(PROMPTS)]
        ids = np.tile(part[: draw.integers(4, len(part) + 1)], draw.integers(1, 3))
        rules = {"seed": number, **RULES[number % len(RULES)]}
        found.append(asked(ids, held[number % len(held)], int(draw.integers(12, 40)), **rules))
    return found


async def compare(speculative: dict[str, Any], requests: list[Any], **settings: Any) -> Any:
    async with running(FOLDER, **settings) as own:
        wanted = await collected(own, requests)
    async with running(FOLDER, speculative=speculative, **settings) as own:
        await check_twice(own, requests, wanted)
        assert (await quiet(own))["matchers"] == 0
        return drafts_of(own)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_prefill_chunk": 7, "max_num_batched_tokens": 48, "jump_forward": True},
    {"num_gpu_blocks_override": 40, "max_model_len": 320, "jump_forward": False},
]
DRAFTERS = ["ngram", "suffix", "eagle3", "peagle", "dflash", "draft_model"]


def drafter(name: str, most: int) -> dict[str, Any]:
    folder = {
        "eagle3": lambda: drafters.eagle3("qwen3", Form()),
        "peagle": lambda: drafters.eagle3("qwen3", Form(parallel=True)),
        "dflash": lambda: block_drafters.folder_of("qwen3", block_drafters.Form()),
        "draft_model": lambda: FOLDER,
    }.get(name)
    named = {"method": name} if name in ("ngram", "suffix", "draft_model") else {}
    return {**named, "num_speculative_tokens": most, **({"model": str(folder())} if folder else {})}


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "chunks-jumps", "pressure"])
@pytest.mark.parametrize("name", ["eagle3", "ngram", "draft_model"])
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_answers_are_those_without_drafts(on_path, name, settings):
    drafts = await compare(drafter(name, 4), requests_of(3, 16), **settings)
    assert drafts.num_draft_tokens > 80
    assert drafts.num_accepted_tokens > (10 if name == "ngram" else 0)


@pytest.mark.full
@pytest.mark.parametrize("most", [1, 4, 7])
@pytest.mark.parametrize("name", DRAFTERS)
async def test_random_requests_of_all_kinds(name, most, monkeypatch):
    """2,016 requests: grammars with and without log-probabilities, and what other requests may ask for."""
    if path := (DRAFTERS.index(name) + most) % 3:
        made = (HostAccelerator, StandInAccelerator)[path - 1]
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: made())
    requests = [*requests_of(most, 56), *test_drafts.requests_of(10 + most, 56)]
    np.random.default_rng(most).shuffle(requests)
    await compare(drafter(name, most), requests, **SETTINGS[most % 3])


@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_the_text_on_the_device_has_the_tokens_that_a_grammar_forces(on_path):
    held = asked(PROMPTS[1], grammar('start: ("all of this is said " /[0-9]/ ". ")+'), 50, ignore_eos=True)
    async with running(FOLDER, speculative=ngram(3), jump_forward=True) as own:
        (((tokens, _, _),),) = await collected(own, [held])
        texts = await own.on_device(lambda runtime: runtime.executor.part(Drafts).texts.tokens.tolist())
    whole = [*held.prompt_token_ids.tolist(), *tokens]
    assert any(text[: len(whole)] == whole for text in texts)


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_a_repeated_text_under_a_grammar_takes_fewer_steps(on_path):
    held = asked(PROMPTS[0], grammar('start: ("x yes, no; ")*'), 60, temperature=0.0, ignore_eos=True)
    steps = []
    for speculative in ({}, ngram(6)):
        async with running(FOLDER, speculative=speculative, jump_forward=False) as own:
            (((tokens, _, finish),),) = await collected(own, [held])
            assert TOKENIZER.decode(tokens).startswith("x yes, no; x yes, no; ")
            assert (len(tokens), finish) == (60, FinishReason.LENGTH)
            steps.append(own.stats.steps)
    assert steps[1] < 0.5 * steps[0]
