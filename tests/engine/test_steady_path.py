"""Launcher, steady loop and device executor together on a CPU: Python's steps and the loop's give the host's tokens."""

import asyncio
import gc

import numpy as np
import pytest

import engine.run.start
from engine import Engine
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine_kit import answer, answer_deltas, running, text_request
from tests.invariance.test_text import NAMES, PROMPTS, alone, request


@pytest.fixture
def wanted(name):
    """The host's tokens, computed before `made` takes effect."""
    return alone(name)


@pytest.fixture
def made(monkeypatch):
    """The accelerators that engines open: stand-ins, whose graphs must not fail."""
    opened: list[StandInAccelerator] = []

    def open_accelerator(_device):
        opened.append(StandInAccelerator())
        return opened[-1]

    monkeypatch.setattr(engine.run.start, "open_accelerator", open_accelerator)
    yield opened
    assert [accelerator.errors for accelerator in opened] == [[]] * len(opened)
    opened.clear()
    gc.collect()  # launchers release their events before another test creates some


def steady_steps(engine: Engine) -> int:
    return engine.inspect().steady.num_steps


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_prefill_chunk": 7},
        {"num_gpu_blocks_override": 40, "max_model_len": 512},
        {"max_num_batched_tokens": 64},
    ],
    ids=["graphs", "chunks", "pressure", "small-budget"],
)
@pytest.mark.parametrize("name", NAMES)
async def test_greedy_tokens_are_those_of_the_host(wanted, made, name, settings):
    # The memory profile runs the towers once on the largest item: here a small one.
    async with running(tiny.checkpoint(name), encoder_cache_tokens=64, **settings) as engine:
        got = await asyncio.gather(*[answer(engine, request(prompt)) for prompt in PROMPTS])
        assert [choices[0] for choices in got] == wanted
        assert steady_steps(engine) > 10


@pytest.mark.parametrize("name", ["qwen3"])
async def test_rows_that_may_bring_home_more_tokens_bring_the_same(wanted, made, name):
    async with running(tiny.checkpoint(name), speculative={"method": "ngram", "num_speculative_tokens": 3}) as served:
        got = await asyncio.gather(*[answer(served, request(prompt)) for prompt in PROMPTS])
        assert [choices[0] for choices in got] == wanted
        assert steady_steps(served) > 10


RULES = [
    {},
    {"temperature": 1.0, "top_p": 0.9, "seed": 5},
    {"repetition_penalty": 1.3},
    {"temperature": 1.2, "top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.01, "seed": 4},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1},
    {"logit_bias": ((5, 3.0), (17, -100.0))},
    {"bad_words": ((7,), (30, 31))},
    {"logprobs": 3},
    {"n": 2, "temperature": 0.8, "seed": 9},
    {"eos_token_ids": tuple(range(150)), "min_tokens": 5, "ignore_eos": False},
    {"prompt_logprobs": 2},
]


async def collected(engine: Engine) -> list:
    """Tokens, log-probabilities and finish reasons of requests of every kind that decode together."""

    async def ask(number: int) -> list:
        await asyncio.sleep(0.003 * number)
        rules = {"ignore_eos": True, **RULES[number % len(RULES)]}
        most = 8 + number % 7 if number % len(RULES) else 120  # plain rows run longer than the others
        sent = text_request(PROMPTS[number % len(PROMPTS)], most, n=rules.pop("n", 1), **rules)
        found = []
        for deltas in await answer_deltas(engine, sent):
            tokens = [token for delta in deltas for token in delta.token_ids]
            entries = [entry.token_id for delta in deltas for entry in delta.logprobs or ()]
            found.append((tokens, entries, deltas[-1].finish_reason))
        return found

    return await asyncio.gather(*[ask(number) for number in range(27)])


async def test_requests_of_every_kind_get_what_python_alone_gives_them(made, monkeypatch):
    """Steps with plain rows, rows with rules and prompts alternate between the GIL-free loop and Python."""
    with monkeypatch.context() as python:
        python.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
        async with running(tiny.checkpoint("qwen3"), enable_prefix_caching=False) as own:
            wanted = await collected(own)
    async with running(tiny.checkpoint("qwen3"), enable_prefix_caching=False) as own:
        assert await collected(own) == wanted
        assert steady_steps(own) > 10


async def test_rows_with_rules_and_log_probabilities_decode_without_python(made, monkeypatch):
    """Penalties, bias, bans, min_tokens and log-probabilities in one batch with plain rows."""
    asked = [
        {}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.8, "frequency_penalty": 0.4, "logprobs": 2},
        {"logit_bias": ((5, 3.0), (9, -100.0), (17, 2.5))}, {"logprobs": 5},
        {"logprobs": 0, "temperature": 0.7, "seed": 3, "xtc_probability": 0.5},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1, "top_n_sigma": 1.0},
        {"bad_words": ((7,), (11,)), "min_tokens": 60}, {"allowed_token_ids": tuple(range(3, 60)), "logprobs": 20},
    ]  # fmt: skip

    async def ask(own: Engine, number: int) -> tuple[list[int], list]:
        sent = text_request(PROMPTS[number], 100, ignore_eos=True, **asked[number % len(asked)])
        (deltas,) = await answer_deltas(own, sent)
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        collected = [(entry.token_id, entry.rank, entry.top_ids, entry.top_logprobs) for entry in entries]
        return [token for delta in deltas for token in delta.token_ids], collected

    async with running(tiny.checkpoint("qwen3")) as own:
        got = await asyncio.gather(*[ask(own, number) for number in range(16)])
        assert own.stats.steps - own.stats.python_steps == steady_steps(own)
        assert steady_steps(own) > 90, "of a hundred, all but those that compute prompts"
        for number, (tokens, collected) in enumerate(got):
            wanted = tokens if "logprobs" in asked[number % len(asked)] else []
            assert [entry[0] for entry in collected] == wanted
    with monkeypatch.context() as python:
        python.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
        async with running(tiny.checkpoint("qwen3")) as own:
            assert [await ask(own, number) for number in range(16)] == got, "alone, and by Python"


@pytest.mark.parametrize("name", ["qwen3"])
async def test_clients_that_leave_and_come_change_no_other_answer(wanted, made, name):
    draw = np.random.default_rng(3)

    async def leaver(engine: Engine, number: int) -> None:
        await asyncio.sleep(0.002 * number)
        async with engine.submit(text_request(PROMPTS[number], 400, ignore_eos=True)) as stream:
            async for delta in stream:
                if draw.random() < 0.2:
                    break
                assert not delta.finish_reason, delta.error

    async with running(tiny.checkpoint(name)) as own:
        leavers = [asyncio.create_task(leaver(own, number)) for number in range(16)]
        got = await asyncio.gather(*[answer(own, request(prompt)) for prompt in PROMPTS])
        await asyncio.gather(*leavers)
        assert [choices[0] for choices in got] == wanted
        assert steady_steps(own) > 10
