"""Answers with drafts equal those without: on the host, through the device's records, and without the GIL."""

from __future__ import annotations

import asyncio
import gc
import re
from typing import Any

import numpy as np
import pytest

import engine.run.start
from engine import Engine
from engine.base.drafts import DraftConfig, draft_config
from engine.base.errors import ConfigError
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine.test_grammar_rows import FOLDER, PROMPTS, asked, grammar
from tests.engine_kit import answer_deltas, running, text_request

PATHS = ["host", "device", "steady"]
FEW_PATHS = ["host", "steady", pytest.param("device", marks=pytest.mark.full)]  # whose launches are the same
ONE_PATH = [pytest.param("host", marks=pytest.mark.full), *FEW_PATHS[1:]]
VOCAB = tiny.VOCAB_SIZE
OPEN = engine.run.start.open_accelerator
SETTINGS = [
    {},
    {"max_prefill_chunk": 7, "max_num_batched_tokens": 48},
    {"num_gpu_blocks_override": 32, "max_model_len": 320},
    {"max_num_seqs": 4},
]
NAMES = ["plain", "chunks", "pressure", "few-rows"]
# For other drafters than n-grams: `make test` needs only the settings in which rows are cut or computed again.
FEW_SETTINGS = [
    pytest.param(each, id=name, marks=pytest.mark.full if name in ("plain", "few-rows") else ())
    for name, each in zip(NAMES, SETTINGS)
]
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 30, "seed": 7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"frequency_penalty": 0.3, "temperature": 0.6, "seed": 2, "min_p": 0.02},
    {"logprobs": 3},
    {"logprobs": 1, "temperature": 0.9, "seed": 4, "repetition_penalty": 1.1},
    {"logprobs": 2, "logprob_token_ids": (5, 9)},
    {"eos_token_ids": tuple(range(40)), "min_tokens": 9},
    {"stop_token_ids": tuple(range(60, 90))},
    {"logit_bias": ((5, 3.0), (17, -100.0)), "not_first_token_ids": (5,)},
    {"bad_words": ((7,), (30, 31))},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"temperature": 1.1, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.05, "seed": 6},
    {"n": 3, "temperature": 0.7, "seed": 9},
    {"prompt_logprobs": 2},
]


def ngram(most: int, **more: Any) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": most, **more}


@pytest.fixture
def on_path(request, monkeypatch):
    """Makes engines of the path; on an accelerator no graph may fail."""
    opened: list[StandInAccelerator] = []

    def opens(make):
        def open_accelerator(_device):
            made = make()
            opened.append(made)
            return made

        monkeypatch.setattr(engine.run.start, "open_accelerator", open_accelerator)

    if request.param != "host":
        opens(HostAccelerator if request.param == "device" else StandInAccelerator)
    yield request.param
    assert all(not getattr(made, "errors", []) for made in opened)
    opened.clear()
    gc.collect()


def requests_of(seed: int, count: int, longest: int = 40) -> list[Any]:
    """Random requests: texts that repeat themselves and texts that do not, some with equal beginnings.

    An answer has fewer than `longest` tokens, unless a rule asks for more.
    """
    draw = np.random.default_rng(seed)
    shared = draw.integers(2, VOCAB, 40)
    found = []
    for number in range(count):
        part = draw.integers(2, VOCAB, draw.integers(1, 30))
        ids = np.tile(part, draw.integers(1, 4))
        if draw.random() < 0.4:
            ids = np.concatenate([shared[: draw.integers(8, 40)], ids])
        rules = {"ignore_eos": "eos_token_ids" not in RULES[number % len(RULES)], **RULES[number % len(RULES)]}
        most = max(int(draw.integers(1, longest)), rules.get("min_tokens", 0))
        found.append(text_request(ids.astype(np.int32), most, n=rules.pop("n", 1), **rules))
    return found


async def collected(own: Engine, requests: list[Any]) -> list[Any]:
    """By request and choice: tokens, log-probabilities, finish reason."""

    async def ask(number: int, request: Any) -> list[Any]:
        await asyncio.sleep(0.002 * (number % 11))
        found = []
        for deltas in await answer_deltas(own, request):
            entries = [entry for delta in deltas for entry in delta.logprobs or ()]
            values = [(entry.token_id, entry.rank, entry.logprob, *entry.top_logprobs) for entry in entries]
            tokens = [token for delta in deltas for token in delta.token_ids]
            found.append((tokens, values, deltas[-1].finish_reason))
        return found

    return await asyncio.gather(*[ask(number, request) for number, request in enumerate(requests)])


def check(got: list[Any], wanted: list[Any]) -> None:
    for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        for (tokens, values, finish), (tokens2, values2, finish2) in zip(mine, theirs, strict=True):
            assert tokens == tokens2, (number, RULES[number % len(RULES)])
            assert finish == finish2
            assert len(values) == len(values2)
            assert values == [pytest.approx(each, abs=1e-5) for each in values2]


def drafts_of(own: Engine) -> Any:
    return own.inspect().runtime.scheduler.drafts


async def undrafted(folder: Any, requests: list[Any], **settings: Any) -> list[Any]:
    """Answers to greedy requests without drafts: those of the host on every path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.run.start, "open_accelerator", OPEN)
        async with running(folder, **settings) as own:
            return await collected(own, requests)


async def check_twice(own: Engine, requests: list[Any], wanted: list[Any]) -> None:
    """Checks all answers, and then each third again: its prefix is cached."""
    check(await collected(own, requests), wanted)
    check(await collected(own, requests[::3]), wanted[::3])


async def compare_answers(folder, speculative, requests, settings):
    """Answers with drafts are those without, also if prefixes are cached."""
    async with running(folder, **settings) as own:
        wanted = await collected(own, requests)
    async with running(folder, speculative=speculative, **settings) as own:
        await check_twice(own, requests, wanted)
        drafts = drafts_of(own)
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_answers_are_those_without_drafts(on_path, settings, most):
    requests = requests_of(most, 18)
    async with running(tiny.checkpoint("qwen3"), **settings) as own:
        wanted = await collected(own, requests)
    async with running(tiny.checkpoint("qwen3"), speculative=ngram(most), **settings) as own:
        check(await collected(own, requests), wanted)
        check(await collected(own, requests), wanted)  # prefixes are cached now
        drafts = drafts_of(own)
        assert drafts.num_drafts > 20
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
        assert len(drafts.accepted_per_place) == most


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_a_text_that_repeats_itself_takes_fewer_steps(on_path):
    """Right drafts are steps saved; the answer may end inside a run, at its length or at a token."""
    ids = np.tile(np.arange(5, 14), 6)
    async with running(tiny.checkpoint("qwen3"), enable_prefix_caching=False) as own:
        (((whole, _, _),),) = await collected(own, [text_request(ids, 48, ignore_eos=True)])
        steps = own.stats.steps
    repeated = np.concatenate([ids, whole])  # the model's own text: what follows it is known
    requests = [text_request(ids, most, ignore_eos=True) for most in (1, 2, 3, 17, 48)]
    requests.append(text_request(repeated[:60], 40, ignore_eos=True, stop_token_ids=(whole[30],)))
    wanted = await undrafted(tiny.checkpoint("qwen3"), requests)
    async with running(tiny.checkpoint("qwen3"), speculative=ngram(6), enable_prefix_caching=False) as own:
        check(await collected(own, [requests[4]]), [wanted[4]])
        assert own.stats.steps < steps
        check(await collected(own, requests), wanted)


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_a_context_that_ends_inside_a_run_ends_the_answer(on_path):
    rules = {"ignore_eos": True, "allowed_token_ids": (5, 9)}  # such an answer repeats itself
    requests = [text_request(np.tile(np.arange(5, 12), 5)[:count], 200, **rules) for count in range(20, 28)]
    wanted = await undrafted(tiny.checkpoint("qwen3"), requests, max_model_len=64)
    async with running(tiny.checkpoint("qwen3"), max_model_len=64, speculative=ngram(5)) as own:
        check(await collected(own, requests), wanted)
        assert drafts_of(own).num_accepted_tokens > 40
    assert [len(tokens) for ((tokens, _, _),) in wanted] == [64 - count for count in range(20, 28)]


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_rows_with_grammars_share_steps_with_drafted_rows(on_path):
    held = grammar('start: "all of this is said" | "all or nothing"')
    requests = [text_request(np.tile(np.arange(5, 12), 5), 40, ignore_eos=True) for _ in range(3)]
    requests += [asked(PROMPTS[0], held), asked(PROMPTS[1], held)]
    async with running(FOLDER) as own:
        wanted = await collected(own, requests)
    async with running(FOLDER, speculative=ngram(4)) as own:
        check(await collected(own, requests), wanted)
        assert drafts_of(own).num_accepted_tokens > 0


async def test_an_answer_that_is_left_in_a_run_leaves_nothing():
    async with running(tiny.checkpoint("qwen3"), speculative=ngram(4)) as own:
        for most in range(1, 9):
            async with own.submit(text_request(np.tile(np.arange(5, 9), 6), 60, ignore_eos=True)) as stream:
                for _ in range(most):
                    await anext(stream)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "ngram"}, "num_speculative_tokens is missing; give a whole number from 1 to 64"),
        (ngram(0), "num_speculative_tokens is 0"),
        (ngram(65), "num_speculative_tokens is 65"),
        (ngram(True), "num_speculative_tokens is True"),
        (ngram(2.5), "num_speculative_tokens is 2.5"),
        ({"num_speculative_tokens": 3}, "method is missing; there are ngram, suffix, eagle3,"),
        ({"method": "ngram", "num_speculative_tokens": 3, "promt_lookup_max": 3}, "did you mean 'prompt_lookup_max'?"),
        (ngram(3, tree=1), "unknown key 'tree'; there are method, model"),
        ({"method": "medusa", "num_speculative_tokens": 3}, "method 'medusa' is not supported"),
        ({"method": "mlp_speculator", "model": "x"}, "method 'mlp_speculator' is not supported"),
        ({"method": "eagle", "model": "x"}, "method 'eagle' is not supported"),
        ({"method": "mtp"}, "num_speculative_tokens is missing"),
        ({"method": "mtp", "model": "x"}, "model='x' is for a drafter; method mtp has none"),
        (
            {"method": "eagle3", "num_speculative_tokens": 3},
            "model=None names no drafter; give the folder",
        ),
        ({"model": 3, "num_speculative_tokens": 3}, "model=3 names no drafter"),
        ({"model": "x", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"model": "x", "prompt_lookup_max": 2}, "prompt_lookup_max is for method ngram"),
        ({"method": "guess", "num_speculative_tokens": 3}, "method 'guess' is unknown"),
        (
            ngram(3, draft_sample_method="greedy"),
            "draft_sample_method is for method eagle3 or peagle or dflash",
        ),
        ({"method": "mtp", "num_speculative_tokens": 2, "max_model_len": 9}, "max_model_len is for method draft_model"),
        ({"method": "draft_model"}, "model=None names no drafter; give the folder or the repository of a small model"),
        (ngram(3, enable_adaptive_verification=1), "enable_adaptive_verification is 1; give true or false"),
        (ngram(3, num_speculative_tokens_per_batch_size=4), "4; give a list of [least rows, most rows, drafts]"),
        (ngram(3, num_speculative_tokens_per_batch_size=[[1, 2]]), "[1, 2]; give a list of [least rows"),
        (ngram(3, num_speculative_tokens_per_batch_size=[[1, 2, 4]]), "[1, 2, 4]; ranges of rows are from 1 on"),
        (ngram(3, num_speculative_tokens_per_batch_size=[[1, 4, 2], [4, 8, 1]]), "[4, 8, 1]; ranges of rows"),
        (ngram(3, quantisation="fp8"), "unknown key 'quantisation'; did you mean 'quantization'?"),
        (ngram(3, quantization="fp8"), "quantization is for method eagle3 or peagle"),
        (ngram(3, draft_tensor_parallel_size=True), "draft_tensor_parallel_size=True: a drafter is on one device"),
        (ngram(3, speculative_token_tree="[(0,)]"), "speculative_token_tree='[(0,)]': drafts are chains"),
        (ngram(3, model="x"), "model='x' is for a drafter; method ngram has none"),
        (ngram(3, prompt_lookup_max=0), "prompt_lookup_max is 0; give a whole number from 1 to 32"),
        (ngram(3, prompt_lookup_min=4, prompt_lookup_max=2), "prompt_lookup_min 4 is above prompt_lookup_max 2"),
    ],
)
def test_wrong_settings_are_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        draft_config(given)


def test_a_longer_least_match_raises_the_longest():
    assert draft_config({}) is None
    assert draft_config(ngram(3)) == DraftConfig(3, 1, 5)
    passed = {"draft_tensor_parallel_size": 1, "rejection_sample_method": "standard", "quantization": None}
    assert draft_config(ngram(3, **passed)) == DraftConfig(3, 1, 5)
    given = draft_config(
        ngram(3, num_speculative_tokens_per_batch_size=[[1, 4, 2], [5, 8, 0]], enable_adaptive_verification=False)
    )
    assert given == DraftConfig(3, 1, 5, adaptive=False, by_rows=((1, 4, 2), (5, 8, 0)))
    assert draft_config(ngram(3, prompt_lookup_min=9)) == DraftConfig(3, 9, 9)


async def test_a_model_that_pools_refuses_the_flag():
    with pytest.raises(ConfigError, match=r"--speculative-config.*computes vectors"):
        async with running(tiny.checkpoint("qwen3"), speculative=ngram(2), runner="pooling"):
            pass
