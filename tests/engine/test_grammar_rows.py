"""Answers under a grammar, through the whole engine: their text, and that nothing else about them changes."""

import asyncio
import json
import re
from dataclasses import replace

import numpy as np
import pytest

import engine.run.start
from _fast.layout import TokenCode
from engine import FinishReason, SamplingParams
from engine.base.grammar import GrammarSpec
from engine.grammar.advance import GrammarRows
from engine.grammar.compile import compile_now
from engine.grammar.row import GrammarRow
from engine.grammar.vocabulary import GrammarVocabulary
from engine.run.loop import DeviceThread
from server.render.load_tokenizer import load_tokenizer
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine_kit import prompts, quiet, running, text_request

FOLDER = tiny.checkpoint("qwen3")
TOKENIZER = load_tokenizer(FOLDER)
VOCABULARY = GrammarVocabulary(TOKENIZER.token_bytes, TOKENIZER.is_special, TOKENIZER.vocab_size, TOKENIZER.encode)
END = tiny.IDS["<|im_end|>"]
A, N, Y, Z = (TOKENIZER.encode(letter)[0] for letter in "anyz")
PROMPTS = prompts(8, tiny.FIRST_SPECIAL, seed=3, longest=60)
SCHEMA = json.dumps({
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
})  # fmt: skip


def grammar(text, kind="lark", **fields):
    return compile_now(GrammarSpec(kind, text, **fields), VOCABULARY)


JSON, WORD, OPEN = grammar(SCHEMA, "schema"), grammar('start: "yes" | "no"'), grammar("start: /[a-f]+/")


@pytest.fixture
def path(where, monkeypatch):
    if where != "host":
        made = {"device": HostAccelerator, "steady": StandInAccelerator}[where]
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: made())
    return where


everywhere = pytest.mark.parametrize("where", ["host", "device", "steady"])


def asked(prompt, grammar=None, max_tokens=64, **rules):
    rules = {"eos_token_ids": (END,), "temperature": 1.0, "seed": 5, **rules}
    return replace(text_request(prompt, max_tokens, **rules), grammar=grammar)


async def emitted(engine, request):
    """Tokens, finish reason and error of each choice."""
    choices, found = [[] for _ in range(request.n)], []
    async with engine.submit(request) as stream:
        async for delta in stream:
            choices[delta.index].append(delta)
    for deltas in choices:
        tokens = [token for delta in deltas for token in delta.token_ids]
        found.append((tokens, deltas[-1].finish_reason, deltas[-1].error))
    return found


def text(tokens):
    return TOKENIZER.decode([token for token in tokens if token != END])


@everywhere
async def test_answers_are_of_the_grammar_and_neighbours_keep_their_tokens(path):
    async with running(FOLDER) as engine:
        free = [asked(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS[:4]]
        wanted = [await emitted(engine, request) for request in free]
        held = [asked(prompt, each) for prompt in PROMPTS[4:] for each in (JSON, WORD)]
        alone = [await emitted(engine, request) for request in held]
        got = await asyncio.gather(*[emitted(engine, request) for request in (*free, *held)])
    assert got == [*wanted, *alone]
    for (tokens, finish, error), of in zip((each[0] for each in alone), [JSON, WORD] * 4):
        assert (finish, error) == (FinishReason.COMPLETE, None)
        said = text(tokens)
        if of is WORD:
            assert said in ("yes", "no")
        else:
            value = json.loads(said)
            assert 0 <= value["a"] <= 99
            assert value["b"] in ("x", "yy")


@everywhere
async def test_a_sleeping_grammar_leaves_the_answer_free_until_its_token(path):
    async with running(FOLDER) as engine:
        free = asked(PROMPTS[0], max_tokens=40, ignore_eos=True, temperature=1.5)
        ((tokens, _, _),) = await emitted(engine, free)
        wake = tokens[12]
        first = tokens.index(wake)
        late = replace(free, grammar=grammar('start: "yes"', starts=(wake,)))
        ((held, finish, _),) = await emitted(engine, late)
        assert held[: first + 1] == tokens[: first + 1]
        assert (text(held[first + 1 :]), finish) == ("yes", FinishReason.COMPLETE)
        never = replace(free, grammar=grammar('start: "yes"', starts=(tiny.IDS["<|AUDIO|>"],)))
        ((held, finish, _),) = await emitted(engine, never)
        assert (held, finish) == (tokens, FinishReason.LENGTH)


@everywhere
async def test_a_token_that_wakes_a_grammar_may_be_its_first(path):
    async with running(FOLDER) as engine:
        free = asked(PROMPTS[0], max_tokens=40, ignore_eos=True, temperature=1.5)
        ((tokens, _, _),) = await emitted(engine, free)
        wake = tokens[12]
        first = tokens.index(wake)
        for text_of in (f'start: <[{wake}]> "yes"', f'start: (/(?s:.*)/ <[{wake}]> "yes")*'):
            late = replace(free, grammar=grammar(text_of, starts=(wake,), fed=(wake,)), sampling=free.sampling)
            ((held, _, error),) = await emitted(engine, late)
            assert error is None
            assert held[: first + 1] == tokens[: first + 1]
            assert text(held[first + 1 :]).startswith("yes")
        assert (await quiet(engine))["matchers"] == 0


@everywhere
async def test_a_spent_budget_forces_the_token_that_wakes_the_grammar(path):
    wake = tiny.IDS["<|vision_eos|>"]
    async with running(FOLDER) as engine:
        free = asked(PROMPTS[0], max_tokens=20, ignore_eos=True, temperature=1.5, logit_bias=((wake, -100.0),))
        ((tokens, _, _),) = await emitted(engine, free)
        for budget in (0, 1, 5):
            late = grammar('start: "yes"', starts=(wake,), budget=budget)
            ((held, finish, _),) = await emitted(engine, replace(free, grammar=late))
            assert held[: budget + 1] == [*tokens[:budget], wake]
            assert (text(held[budget + 1 :]), finish) == ("yes", FinishReason.COMPLETE)
        ((held, finish, _),) = await emitted(
            engine, replace(free, grammar=grammar("", "free", starts=(wake,), budget=3))
        )
        assert held[:4] == [*tokens[:3], wake]
        assert (len(held), finish) == (20, FinishReason.LENGTH)


@everywhere
async def test_sleeping_rows_stay_in_the_loop_without_the_gil_and_wake_at_their_token(path):
    """Also in a batch with other rows, after a preemption, and for rows whose steps always run in Python."""
    async with running(FOLDER) as engine:
        free = [asked(prompt, max_tokens=40, ignore_eos=True, seed=at) for at, prompt in enumerate(PROMPTS[:3])]
        plain = [(await emitted(engine, request))[0][0] for request in free]
    wakes = [tokens[20 + at] for at, tokens in enumerate(plain)]
    late = [replace(one, grammar=grammar("start: /[a-f]{3}/", starts=(wake, 1))) for one, wake in zip(free, wakes)]
    # With log-probabilities these rows always need Python.
    told_too = [replace(one, sampling=replace(one.sampling, logprobs=1)) for one in late]
    steps = []
    async with running(FOLDER) as engine:
        engine.on_step = steps.append
        alone = [(await emitted(engine, one))[0] for one in late]
        by_python = [stats.by_python for stats in steps if stats.num_rows]
        slowly = [(await emitted(engine, one))[0] for one in told_too]
        together = await asyncio.gather(*[emitted(engine, one) for one in (*late, *free)])
        assert (await quiet(engine))["matchers"] == 0
    async with running(FOLDER, num_gpu_blocks_override=18, max_model_len=256) as engine:
        pressed = await asyncio.gather(*[emitted(engine, one) for one in (*late, *free)])
    for (tokens, finish, _), before, wake in zip(alone, plain, wakes):
        first = next(at for at, token in enumerate(before) if token in (wake, 1))
        assert tokens[: first + 1] == before[: first + 1]
        assert re.fullmatch("[a-f]{3}", text(tokens[first + 1 :]))
        assert finish is FinishReason.COMPLETE
    assert slowly == alone
    assert [each[0] for each in together] == [*alone, *[(tokens, FinishReason.LENGTH, None) for tokens in plain]]
    assert pressed == together
    if path == "steady":
        assert sum(by_python) < 0.5 * len(by_python)


@everywhere
async def test_a_grammar_may_wait_only_if_the_answer_opens_so(path):
    opens, wake = tiny.IDS["<|vision_bos|>"], tiny.IDS["<|vision_eos|>"]
    both = grammar('start: "yes"', starts=(wake,), opens=(opens,))
    async with running(FOLDER) as engine:
        ((tokens, finish, _),) = await emitted(engine, asked(PROMPTS[0], both, logit_bias=((opens, -100.0),)))
        assert (text(tokens), finish) == ("yes", FinishReason.COMPLETE)
        bias = ((opens, 100.0), (wake, 100.0))
        ((tokens, finish, _),) = await emitted(engine, asked(PROMPTS[0], both, logit_bias=bias))
        assert (tokens[0], finish) == (opens, FinishReason.COMPLETE) or tokens.count(wake) == 0
    assert text(tokens[tokens.index(wake) + 1 :]) == "yes"


def test_white_space_in_front_of_reasoning_is_none_of_the_answers():
    opens, wake = tiny.IDS["<|vision_bos|>"], tiny.IDS["<|vision_eos|>"]
    both = grammar(r'start: /\n?/ "yes"', starts=(wake,), opens=(opens,))
    line_end = TOKENIZER.encode("\n")[0]
    row, plain = (GrammarRow(both, SamplingParams(eos_token_ids=(END,))) for _ in range(2))
    assert row.take(line_end) is None
    assert row.may_open
    assert row.take(opens) is None
    assert row.matcher is None
    assert row.take(wake) is None
    assert row.matcher is not None
    assert not row.may_open
    assert row.take(line_end) is None, "the answer has a line end of its own"
    assert plain.take(Y) is None
    assert not plain.may_open


CASES = {
    "n": ({"n": 3}, {}),
    "chunks": ({}, {"max_prefill_chunk": 7}),
    "pressure": ({}, {"num_gpu_blocks_override": 24, "max_model_len": 256}),
    "rules": ({"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": ((tiny.IDS["<|im_end|>"], 5.0),)}, {}),
    "logprobs": ({"logprobs": 2}, {}),
    "processed": ({"logprobs": 2}, {"logprobs_mode": "processed_logprobs"}),
    "greedy": ({"temperature": 0.0}, {}),
    "samplers": (
        {
            "dry_multiplier": 1.0,
            "top_n_sigma": 2.0,
            "xtc_probability": 0.3,
        },
        {"num_gpu_blocks_override": 24, "max_model_len": 256},
    ),
    "cuts": ({"top_k": 5, "top_p": 0.9, "min_p": 0.01}, {}),
}


@pytest.mark.parametrize(
    ("where", "case"),
    [
        *(("host", case) for case in CASES),
        *(("device", case) for case in ("n", "rules", "processed", "samplers")),
        *(("steady", case) for case in ("chunks", "pressure", "logprobs", "cuts")),
    ],
)
async def test_held_answers_are_the_same_in_any_company(path, case):
    rules, settings = CASES[case]
    n = rules.get("n", 1)
    held = [
        replace(asked(prompt, each, **{key: value for key, value in rules.items() if key != "n"}), n=n)
        for prompt in PROMPTS[:4]
        for each in (JSON, OPEN)
    ]
    async with running(FOLDER, enable_prefix_caching=case == "n") as engine:
        alone = [await emitted(engine, request) for request in held[:4]]
    async with running(FOLDER, **settings) as engine:
        got = await asyncio.gather(*[emitted(engine, request) for request in held])
        assert got[:4] == alone
        assert (await quiet(engine))["matchers"] == 0
    for choices, of in zip(got, [JSON, OPEN] * 4):
        for tokens, finish, error in choices:
            assert error is None
            if of is JSON:
                assert finish is FinishReason.COMPLETE
                assert json.loads(text(tokens))["b"] in ("x", "yy")
            else:
                assert set(text(tokens)) <= set("abcdef")


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(
    ("of", "rules", "said", "finish"),
    [
        (OPEN, {"min_tokens": 8, "max_tokens": 8}, "[a-f]{8}", FinishReason.LENGTH),
        (WORD, {"min_tokens": 60}, "yes|no", FinishReason.COMPLETE),  # the grammar takes precedence
        (OPEN, {"ignore_eos": True, "max_tokens": 12}, "[a-f]{12}", FinishReason.LENGTH),
        (grammar('start: ""'), {}, "", FinishReason.STOP),
        (grammar('start: ""'), {"ignore_eos": True}, "", FinishReason.COMPLETE),
        (grammar('start: "a"?'), {"min_tokens": 5, "bad_words": ((A,),)}, "", FinishReason.COMPLETE),
        (OPEN, {"stop_token_ids": (Z,), "logit_bias": ((Z, 100.0),)}, "[a-f]z", FinishReason.STOP_TOKEN),
        (WORD, {"allowed_token_ids": (Z,)}, "", FinishReason.ERROR),
        (WORD, {"bad_words": ((Y,), (N,))}, "", FinishReason.ERROR),
    ],
)
async def test_other_rules_together_with_a_grammar(path, of, rules, said, finish):
    async with running(FOLDER) as engine:
        ((tokens, ended, error),) = await emitted(engine, asked(PROMPTS[0], of, **rules))
    assert ended is finish
    assert (error.reason == "grammar_conflict") if finish is FinishReason.ERROR else error is None
    assert re.fullmatch(said, text(tokens))


@pytest.mark.parametrize(
    ("starts", "run", "count", "says"),
    [
        ((), "yes", 3, "complete"),
        ((), "no!", 2, "complete"),  # tokens after the end of the text are dropped
        ((), "ye", None, None),
        ((), "yn", 1, "error"),
        (("z",), "aza", 2, None),  # tokens after the grammar's start token were sampled without a mask
        (("z",), "aa", None, None),
    ],
)
def test_a_run_is_cut_where_the_grammar_ends_or_begins(starts, run, count, says):
    rows, letters = GrammarRows(1), [TOKENIZER.encode(letter)[0] for letter in run]
    starts = tuple(TOKENIZER.encode(letter)[0] for letter in starts)
    rows.admit(0, grammar('start: "yes" | "no"', starts=starts), SamplingParams(eos_token_ids=(END,)))
    found = rows.consume(np.zeros(1, np.int64), np.array([[*letters, *[TokenCode.END] * (4 - len(run))]])).cuts
    if count is None:
        assert found == {}
    else:
        kept, end = found[0]
        assert kept == count
        assert says == (None if end is None else "error" if end.error else "complete")


@pytest.mark.parametrize("number", range(3))
def test_each_bit_says_whether_the_matcher_takes_the_token(number):
    """Compares the bits in random states of a grammar with a brute-force check of every token."""
    of = (JSON, OPEN, WORD)[number]
    rng, rows = np.random.default_rng(number), GrammarRows(1)
    params = SamplingParams(eos_token_ids=(END,))
    for _ in range(12):
        rows.admit(0, of, params)
        own = of.matcher()
        for _ in range(40):
            lines = rows.fill(np.zeros(1, np.int64), lambda *shape: np.zeros(shape, np.int32), lambda slot: None)
            flags = lines.flags(0, tiny.VOCAB_SIZE)
            taken = [own.validate_tokens([token]) == 1 for token in range(VOCABULARY.end)]
            taken[END] = own.is_accepting()
            assert flags[: VOCABULARY.end].tolist() == taken
            assert not flags[VOCABULARY.end :].any()
            token = int(rng.choice(np.flatnonzero(flags)))
            if rows.consume(np.zeros(1, np.int64), np.array([[token]])).cuts or token == END:
                break
            own.consume_token(token)
        rows.reset(0)
    assert rows.ledger() == {"matchers": 0}


@pytest.mark.parametrize("where", ["device"])
async def test_held_rows_choose_by_the_graph_and_are_delivered_after_the_next_launch(path, where, monkeypatch):
    seen, launch, deliver = [], DeviceThread._launch, DeviceThread._deliver
    monkeypatch.setattr(DeviceThread, "_launch", lambda *args: seen.append("L") or launch(*args))
    monkeypatch.setattr(DeviceThread, "_deliver", lambda *args: seen.append("t") or deliver(*args))
    async with running(FOLDER) as engine:
        counts = engine.inspect().runtime.executor.backend.launcher.counts
        alone = await emitted(engine, asked(PROMPTS[0], OPEN, max_tokens=20))
        before = dict(counts)
        named = await emitted(engine, asked(PROMPTS[0], OPEN, max_tokens=20, logprobs=0, logprob_token_ids=(A,)))
        assert counts["sample"] == before["sample"]
    assert named[0][0] == alone[0][0]
    assert before["sample"] >= len(alone[0][0]) > 10
    assert "".join(seen).startswith("LLL" + "tL" * 8)
