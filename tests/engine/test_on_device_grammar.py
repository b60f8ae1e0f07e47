"""Answers under a grammar on a GPU: masks copied through pinned memory, and rows that wake in the steady loop.

Engines are deterministic, so a row has the same bits in any batch.
"""

import asyncio
import json
import re
from dataclasses import replace

import pytest
import torch

from engine import FinishReason
from tests.engine.test_grammar_rows import FOLDER, JSON, PROMPTS, asked, emitted, grammar, text
from tests.engine_kit import quiet, running

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
CARD = {"device": "cuda", "deterministic": True}


async def test_held_rows_follow_their_grammar_and_neighbours_keep_their_tokens():
    plain = [asked(prompt, max_tokens=40, ignore_eos=True, seed=at) for at, prompt in enumerate(PROMPTS)]
    held = [asked(prompt, JSON, seed=at) for at, prompt in enumerate(PROMPTS)]
    async with running(FOLDER, **CARD) as engine:
        alone = [(await emitted(engine, request))[0] for request in (*plain, *held)]
        together = await asyncio.gather(*[emitted(engine, request) for request in (*plain, *held)])
        assert (await quiet(engine))["matchers"] == 0
    assert [each[0] for each in together] == alone
    for tokens, finish, error in alone[len(plain) :]:
        assert (finish, error) == (FinishReason.COMPLETE, None)
        said = json.loads(text(tokens))
        assert 0 <= said["a"] <= 99
        assert said["b"] in ("x", "yy")


async def test_a_sleeping_grammar_wakes_in_the_steady_loop_as_in_pythons_steps():
    free = [asked(prompt, max_tokens=60, ignore_eos=True, seed=at) for at, prompt in enumerate(PROMPTS)]
    async with running(FOLDER, **CARD) as engine:
        plain = [(await emitted(engine, request))[0][0] for request in free]
        wakes = [tokens[20 + at] for at, tokens in enumerate(plain)]
        late = [replace(one, grammar=grammar("start: /[a-f]{3}/", starts=(at,))) for one, at in zip(free, wakes)]
        in_python = [replace(one, sampling=replace(one.sampling, logprobs=1)) for one in late]
        steps = []
        engine.on_step = steps.append
        alone = [(await emitted(engine, one))[0] for one in late]
        by_python = [stats.by_python for stats in steps if stats.num_rows]
        slowly = [(await emitted(engine, one))[0] for one in in_python]
        together = await asyncio.gather(*[emitted(engine, one) for one in (*late, *free)])
        assert (await quiet(engine))["matchers"] == 0
    assert slowly == alone
    assert [each[0] for each in together[: len(late)]] == alone
    assert [each[0][0] for each in together[len(late) :]] == plain
    assert sum(by_python) < 0.5 * len(by_python)
    for (tokens, finish, _), before, wake in zip(alone, plain, wakes):
        first = before.index(wake)
        assert tokens[: first + 1] == before[: first + 1]
        assert re.fullmatch("[a-f]{3}", text(tokens[first + 1 :]))
        assert finish is FinishReason.COMPLETE
