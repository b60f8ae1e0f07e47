"""A token is forced where a grammar allows no other. Forced tokens are computed together and are equal in any batch."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from engine import FinishReason
from engine.base.errors import StepFailedError
from engine.base.request import SamplingParams
from engine.grammar.row import GrammarRow, chooses_freely, settled
from tests import tiny
from tests.engine.test_faults import model_of
from tests.engine.test_grammar_rows import (
    END,
    FOLDER,
    PROMPTS,
    TOKENIZER,
    asked,
    emitted,
    everywhere,
    grammar,
    path,
    text,
)
from tests.engine_kit import quiet, running

__all__ = ["path"]
LONG = json.dumps({
    "type": "object", "required": ["surname", "town"], "additionalProperties": False,
    "properties": {"surname": {"enum": ["Ibsen", "Grieg"]}, "town": {"enum": ["Bergen", "Skien"]}},
    "x-guidance": {"whitespace_flexible": False},
})  # fmt: skip
HELD = grammar(LONG, "schema")
FIXED = grammar('start: "all of this is said"')
CLOSED = grammar('start: "[all, of, it, and, no, more]"')


async def steps_of(engine, request):
    """A request's answer, and the number of its steps."""
    steps = []
    engine.on_step = steps.append
    answer = await emitted(engine, request)
    return answer, sum(stats.num_rows > 0 for stats in steps)


@everywhere
async def test_forced_tokens_take_fewer_steps_and_say_the_same(path):
    async with running(FOLDER, jump_forward=False) as engine:
        (plain,), slow = await steps_of(engine, asked(PROMPTS[0], HELD))
    async with running(FOLDER, jump_forward=True) as engine:
        (jumped,), fast = await steps_of(engine, asked(PROMPTS[0], HELD))
        (fixed,), least = await steps_of(engine, asked(PROMPTS[0], FIXED))
        ((closed, finish, _),), few = await steps_of(engine, asked(PROMPTS[0], CLOSED))
        assert (await quiet(engine))["matchers"] == 0
    for tokens, finish, error in (plain, jumped):
        assert (finish, error) == (FinishReason.COMPLETE, None)
        assert set(json.loads(text(tokens))) == {"surname", "town"}
    assert fast < 0.5 * slow
    assert (text(fixed[0]), fixed[1]) == ("all of this is said", FinishReason.COMPLETE)
    assert least < len(fixed[0]) - 2
    assert (text(closed), finish) == ("[all, of, it, and, no, more]", FinishReason.COMPLETE)
    assert few < len(closed) - 2


CASES = {
    "n": ({"n": 3}, {}),
    "chunks": ({}, {"max_prefill_chunk": 3}),
    "few tokens a step": ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}),
    "pressure": ({}, {"num_gpu_blocks_override": 18, "max_model_len": 256}),
    "greedy": ({"temperature": 0.0}, {}),
}


@pytest.mark.parametrize(
    ("where", "case"),
    [
        *(("host", case) for case in CASES),
        *(pytest.param("device", case, marks=() if case == "n" else pytest.mark.full) for case in CASES),
        ("steady", "pressure"),
    ],
)
async def test_answers_with_forced_tokens_are_the_same_in_any_company(path, case):
    rules, settings = CASES[case]
    n = rules.get("n", 1)
    rules = {key: value for key, value in rules.items() if key != "n"}
    held = [replace(asked(prompt, of, **rules), n=n) for prompt in PROMPTS[:4] for of in (HELD, FIXED, CLOSED)]
    free = [asked(prompt, max_tokens=30, ignore_eos=True, **rules) for prompt in PROMPTS[4:]]
    async with running(FOLDER, jump_forward=True, enable_prefix_caching=case == "n") as engine:
        alone = [await emitted(engine, request) for request in (*held, *free)]
    async with running(FOLDER, jump_forward=True, **settings) as engine:
        got = await asyncio.gather(*[emitted(engine, request) for request in (*held, *free)])
        assert (await quiet(engine))["matchers"] == 0
    assert got == alone


@everywhere
async def test_a_sleeping_grammar_jumps_when_it_wakes(path):
    async with running(FOLDER, jump_forward=True) as engine:
        free = asked(PROMPTS[0], max_tokens=60, ignore_eos=True, temperature=1.5)
        ((tokens, _, _),) = await emitted(engine, free)
        wake = tokens[12]
        first = tokens.index(wake)
        late = replace(free, grammar=grammar('start: "all of this is said"', starts=(wake,)))
        ((held, finish, _),), steps = await steps_of(engine, late)
        beside = await asyncio.gather(*[emitted(engine, late) for _ in range(3)], emitted(engine, free))
    assert held[: first + 1] == tokens[: first + 1]
    assert (text(held[first + 1 :]), finish) == ("all of this is said", FinishReason.COMPLETE)
    assert steps < len(held)
    assert [each[0][0] for each in beside] == [held, held, held, tokens]


@pytest.mark.parametrize("where", ["host", "device"])
async def test_an_answer_is_never_longer_than_asked(path):
    async with running(FOLDER, jump_forward=True) as engine:
        ((whole, _, _),) = await emitted(engine, asked(PROMPTS[0], HELD))
        for most in range(1, len(whole)):
            ((tokens, finish, _),) = await emitted(engine, asked(PROMPTS[0], HELD, most))
            assert len(tokens) == most
            assert finish is FinishReason.LENGTH or tokens == whole
            assert text(whole).startswith(text(tokens))


@everywhere
async def test_the_keys_of_forced_tokens_are_found_by_the_next_turn(path):
    """The cached keys of forced tokens equal those that a prompt with these tokens computes."""
    turns = []
    async with running(FOLDER, jump_forward=True) as engine:
        for held in (HELD, CLOSED):
            ((tokens, _, _),) = await emitted(engine, asked(PROMPTS[1], held))
            turn = asked([*PROMPTS[1], *tokens, 40, 41], max_tokens=8, ignore_eos=True)
            async with engine.submit(turn) as stream:
                deltas = [delta async for delta in stream]
            assert deltas[0].cached_tokens > len(PROMPTS[1])
            turns.append((turn, [token for delta in deltas for token in delta.token_ids]))
    async with running(FOLDER, enable_prefix_caching=False) as engine:
        for turn, wanted in turns:
            assert (await emitted(engine, turn))[0][0] == wanted


async def test_a_step_that_fails_ends_the_answer_wherever_it_is(caplog):
    async with running(FOLDER, jump_forward=True) as engine:
        (wanted,) = await emitted(engine, asked(PROMPTS[0], HELD))
        model, left, failed = model_of(engine), 0, 0
        forward = model.forward

        def failing(*args):
            nonlocal left
            left -= 1
            if left == 0:
                raise ValueError("planted")
            return forward(*args)

        model.forward = failing
        for step in range(1, 12):
            left = step
            ((tokens, _, error),) = await emitted(engine, asked(PROMPTS[0], HELD))
            left = 0
            failed += isinstance(error, StepFailedError)
            assert tokens == wanted[0][: len(tokens)]
            assert await emitted(engine, asked(PROMPTS[0], HELD)) == [wanted]
        held = await quiet(engine)
    assert failed > 5
    assert (held["matchers"], held["slots"]) == (0, 0)


async def test_an_answer_that_is_left_in_the_middle_leaves_nothing():
    async with running(FOLDER, jump_forward=True) as engine:
        for most in range(1, 12):
            async with engine.submit(asked(PROMPTS[0], HELD)) as stream:
                for _ in range(most):
                    if not (await anext(stream, None)):
                        break
        held = await quiet(engine)
    assert held["matchers"] == 0
    assert held["slots"] == 0


@pytest.mark.parametrize(
    "rules",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"dry_multiplier": 1.0},
        {"min_tokens": 3},
        {"logit_bias": ((5, 1.0),)},
        {"allowed_token_ids": (5,)},
        {"bad_words": ((5,),)},
        {"logprobs": 0},
        {"logprob_token_ids": (5,)},
        {"not_first_token_ids": (5,)},
    ],
    ids=str,
)
def test_rows_with_other_rules_choose_each_token(rules):
    params = SamplingParams(eos_token_ids=(END,), **rules)
    assert not chooses_freely(params)
    assert GrammarRow(FIXED, params, jumps=True).jump(50) == []
    assert GrammarRow(FIXED, SamplingParams(eos_token_ids=(END,), seed=3, top_k=4), jumps=True).jump(50)


def test_a_forced_run_stops_before_a_token_that_ends_the_answer_and_before_the_end_of_the_grammar():
    plain = SamplingParams(eos_token_ids=(END,))
    whole = GrammarRow(FIXED, plain, jumps=True).jump(1000)
    assert "all of this is said".startswith(text(whole))
    assert len(text(whole)) < len("all of this is said")
    closed = GrammarRow(CLOSED, plain, jumps=True)
    said = text(closed.jump(1000))
    assert said == "[all, of, it, and, no, more]"[: len(said)]
    assert closed.matcher.compute_ff_bytes().decode() == "[all, of, it, and, no, more]"[len(said) :] != ""
    stop = SamplingParams(eos_token_ids=(END,), stop_token_ids=(whole[3],))
    assert GrammarRow(FIXED, stop, jumps=True).jump(1000) == whole[:3]
    assert GrammarRow(FIXED, plain, jumps=True).jump(4) == whole[:4]
    assert GrammarRow(FIXED, plain, jumps=True).jump(1) == []
    assert GrammarRow(FIXED, plain).jump(1000) == []
    asleep = GrammarRow(grammar('start: "all of this"', starts=(tiny.IDS["<|AUDIO|>"],)), plain, jumps=True)
    assert asleep.jump(1000) == []


def test_a_token_is_chosen_between_two_jumps():
    row = GrammarRow(CLOSED, SamplingParams(eos_token_ids=(END,)), jumps=True)
    assert row.jump(3)
    assert row.jump(1000) == [], "there is more that nobody chooses, but a step in flight must not decide"
    said = row.matcher.compute_ff_bytes().decode()
    assert row.take(TOKENIZER.encode(said)[0]) is None
    assert row.jump(1000)


@pytest.mark.parametrize("of", ['start: "ab" start', 'start: "a"~100000'])
def test_text_without_an_end_is_taken_piece_by_piece_or_token_by_token(of):
    row = GrammarRow(grammar(of), SamplingParams(eos_token_ids=(END,)), jumps=True)
    for _ in range(5):
        assert len(text(row.jump(10_000))) <= 256
        assert not row.matcher.is_error()
        line = row.matcher.compute_bitmask()
        assert row.take(next(token for token in range(len(line) * 8) if line[token >> 3] >> (token & 7) & 1)) is None


async def test_an_answer_without_an_end_ends_at_its_length():
    async with running(FOLDER, jump_forward=True) as engine:
        ((tokens, finish, error),) = await emitted(engine, asked(PROMPTS[0], grammar('start: "ab" start'), 30))
    assert (len(tokens), finish, error) == (30, FinishReason.LENGTH, None)


async def test_a_tokenizer_that_fails_harms_no_request(monkeypatch, caplog):
    async with running(FOLDER, jump_forward=False) as engine:
        plain = await emitted(engine, asked(PROMPTS[0], HELD))
    monkeypatch.setattr(HELD.vocabulary, "encode", lambda text: [][0])
    async with running(FOLDER, jump_forward=True) as engine:
        assert await emitted(engine, asked(PROMPTS[0], HELD)) == plain
    assert "could not be cut into tokens" in caplog.text


def test_settled_text_has_the_tokens_that_it_has_in_the_whole():
    """Texts of calls and values, cut anywhere, with a tokenizer that merges punctuation with spaces and line ends."""
    tokenizer, dice = Tokenizer.from_file("server/embedded/tokenizer.json"), random.Random(0)
    words = ["get_weather", "town", "so-called", "x1", "it's", "", "Zürich", "a\nb", "{", "</b>", "_id", "12 km"]
    for indent in (None, None, 1, 4):
        for _ in range(6):
            drawn = [dice.choice([*words, dice.randint(0, 9999), True, None, [1, {"a": "b"}]]) for _ in range(4)]
            call = {"name": dice.choice(words), "arguments": {dice.choice(words): value for value in drawn}}
            whole = f"<tool_call>\n{json.dumps(call, indent=indent, ensure_ascii=False)}\n</tool_call>"
            ids = tokenizer.encode(whole, add_special_tokens=False).ids
            for end in range(1, len(whole)):
                kept = settled(whole[:end])
                found = tokenizer.encode(whole[:kept], add_special_tokens=False).ids
                assert found == ids[: len(found)], (whole[:end], kept)
    assert settled('{"name": "x", "arguments": {') == len('{"name": "x", "arguments":')
