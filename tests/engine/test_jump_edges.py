"""Forced tokens at the edges of an answer: failing steps, aborts, pauses, cached turns, budgets, UTF-8."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from engine import Engine, EngineConfig, FinishReason
from engine.base.config import FailureLimits
from engine.base.errors import EngineError
from tests import tiny
from tests.engine.test_faults import OOM, plant
from tests.engine.test_grammar_rows import FOLDER, PROMPTS, asked, emitted, everywhere, grammar, path, text
from tests.engine.test_jump_forward import CLOSED, FIXED, HELD, steps_of
from tests.engine_kit import SMALL, quiet, running

__all__ = ["path"]
RULED = "ABCDEFGHIJKLMNOPQRSTUVWXYZ (the year 日本語 😀 naïve)"
LETTERS = grammar(f'start: "{RULED}" /[0-9]/ "{RULED}"')


@pytest.mark.parametrize("fault", [OOM, RuntimeError("planted")], ids=["memory", "fault"])
@pytest.mark.parametrize("where", ["host", "device"])
async def test_a_step_that_fails_amid_forced_tokens_ends_its_rows_and_nothing_else(path, fault, caplog):
    async with running(FOLDER, jump_forward=True, failures=FailureLimits(100, 100)) as engine:
        wanted = [await emitted(engine, asked(PROMPTS[0], of)) for of in (HELD, FIXED, CLOSED)]
        for at in (1, 2, 3, 5):
            plant(engine, {at: fault})
            got = await asyncio.gather(*[emitted(engine, asked(PROMPTS[0], of)) for of in (HELD, FIXED, CLOSED)])
            for ((tokens, finish, error),), ((whole, _, _),) in zip(got, wanted):
                assert whole[: len(tokens)] == tokens
                assert (finish is FinishReason.ERROR) == isinstance(error, EngineError)
                assert finish is FinishReason.ERROR or tokens == whole
            assert (await quiet(engine))["matchers"] == 0
            plant(engine, {})
        assert [await emitted(engine, asked(PROMPTS[0], of)) for of in (HELD, FIXED, CLOSED)] == wanted
        assert engine.state == "ready"


@everywhere
async def test_an_engine_that_pauses_amid_forced_tokens_goes_on_with_the_same_ones(path):
    async with running(FOLDER, jump_forward=True) as engine:
        ((whole, _, _),) = await emitted(engine, asked(PROMPTS[0], HELD))
        for most in (1, 2, 5):
            said = []
            async with engine.submit(asked(PROMPTS[0], HELD)) as stream:
                async for delta in stream:
                    said += delta.token_ids
                    if len(said) <= most:
                        engine.pause()
                        await engine.reset_prefix_cache()  # the device's reply shows that it has received the pause
                        engine.resume()
            assert said == whole


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("most", [1, 3])
async def test_an_engine_that_stops_amid_forced_tokens_ends_every_answer(path, most):
    deltas, engine = [], Engine(EngineConfig(model=str(FOLDER), **SMALL, jump_forward=True))
    await engine.start()
    async with engine.submit(asked(PROMPTS[0], HELD)) as stream:
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == most:
                await engine.stop(0.0)
    assert deltas[-1].finish_reason is not FinishReason.NONE
    assert all(delta.finish_reason is FinishReason.NONE for delta in deltas[:-1])


@everywhere
async def test_blocks_of_forced_tokens_are_found_by_the_next_turn(path):
    found = []
    for jumps in (False, True):
        async with running(FOLDER, jump_forward=jumps, enable_prefix_caching=True) as engine:
            ((tokens, finish, _),) = await emitted(engine, asked(PROMPTS[0], LETTERS, 200))
            assert finish is FinishReason.COMPLETE
            async with engine.submit(asked(np.concatenate([PROMPTS[0], tokens, PROMPTS[1]]), max_tokens=8)) as stream:
                deltas = [delta async for delta in stream]
        async with running(FOLDER, jump_forward=jumps, enable_prefix_caching=False) as engine:
            ((cold, _, _),) = await emitted(
                engine, asked(np.concatenate([PROMPTS[0], tokens, PROMPTS[1]]), max_tokens=8)
            )
        assert [token for delta in deltas for token in delta.token_ids] == cold
        known = len(PROMPTS[0]) + len(tokens)
        found.append(known - deltas[0].cached_tokens)
    assert all(0 <= left <= 17 for left in found), "all full blocks of 16 but what the last sample would have filled"


@everywhere
@pytest.mark.covering(1)
@pytest.mark.parametrize("budget", [0, 1, 5])
async def test_a_spent_budget_wakes_a_grammar_that_jumps(path, budget):
    wake = tiny.IDS["<|vision_eos|>"]
    free = asked(PROMPTS[0], max_tokens=60, ignore_eos=True, temperature=1.5)
    late = replace(free, grammar=grammar('start: "[all, of, it]"', starts=(wake,), budget=budget))
    async with running(FOLDER, jump_forward=False) as engine:
        ((plain, _, _),) = await emitted(engine, late)
    async with running(FOLDER, jump_forward=True) as engine:
        ((held, finish, _),), steps = await steps_of(engine, late)
        beside = await asyncio.gather(*[emitted(engine, late) for _ in range(3)])
    at = held.index(wake)
    assert at <= budget
    assert held[: at + 1] == plain[: at + 1]
    assert (text(held[at + 1 :]), finish) == ("[all, of, it]", FinishReason.COMPLETE)
    assert steps < len(held)
    assert [each[0][0] for each in beside] == [held] * 3


@pytest.mark.parametrize("where", ["host", "device"])
async def test_forced_text_is_cut_anywhere_by_the_length_and_never_changes(path):
    async with running(FOLDER, jump_forward=True) as engine:
        ((whole, finish, _),) = await emitted(engine, asked(PROMPTS[0], LETTERS, 200))
        said = text(whole)
        assert (finish, said.replace(RULED, "").isdigit()) == (FinishReason.COMPLETE, True)
        cuts = range(1, len(whole) - 8)
        got = await asyncio.gather(*[emitted(engine, asked(PROMPTS[0], LETTERS, most)) for most in cuts])
    texts = [text(tokens) for ((tokens, _, _),) in got]
    assert [(len(tokens), end, error) for ((tokens, end, error),) in got] == [
        (most, FinishReason.LENGTH, None) for most in cuts
    ]
    assert all(said.startswith(cut.rstrip("\ufffd")) for cut in texts)
    assert any(cut.endswith("\ufffd") for cut in texts), "some length cuts a character"
