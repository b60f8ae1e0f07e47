"""DRY, top-n-sigma and XTC in an engine: equal to their definitions over transformers' logits, whatever else runs."""

import asyncio
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.errors import RequestError
from engine.base.limits import MAX_HISTORY
from engine.base.request import SamplingParams
from engine.kernels.sampling.dry import HEAD_LEN, MOST, PARTS
from engine.sampling.dry import DryHistory, history_for
from tests import tiny
from tests.engine.circumstances import drawn, same_in_every_circumstance
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_circumstances import TIGHT
from tests.engine_kit import answer, running, text_request
from tests.kernels.repetitions import dry_penalties, packed

FOLDER = tiny.checkpoint("qwen3")
BREAKERS = {5, 40}
DRY = [
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 3.0, "dry_base": 1.2, "dry_allowed_length": 1},
    {"dry_multiplier": 2.0, "dry_penalty_last_n": 12},
    {"dry_multiplier": 1.5, "dry_allowed_length": 4},
]
PLACES = ["host", "device path"]


@cache
def model():
    return tiny.reference(FOLDER)


@pytest.fixture
def place(request, monkeypatch):
    if request.param == "device path":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    return request.param


def vocab() -> int:
    return model().config.vocab_size


def breakers() -> bytes:
    return packed(BREAKERS, vocab())


def said(prompt, count, dry_multiplier, dry_base=1.75, dry_allowed_length=2, dry_penalty_last_n=MAX_HISTORY):
    """A greedy answer with DRY, token by token, over transformers' logits."""
    text = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = model()(torch.tensor([text])).logits[0, -1].tolist()
        numbers = dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n
        for token, value in dry_penalties(text, BREAKERS, *numbers).items():
            logits[token] -= min(value, MOST)
        text.append(max(range(len(logits)), key=logits.__getitem__))
    return text[len(prompt) :]


def repetitive(number: int) -> np.ndarray:
    """A prompt of few words that are repeated."""
    draw = np.random.default_rng(number)
    words = [draw.integers(2, 90, draw.integers(1, 5)) for _ in range(4)]
    return np.concatenate([words[k] for k in draw.integers(0, 4, 12)]).astype(np.int32)


@pytest.mark.parametrize("place", PLACES, indirect=True)
async def test_greedy_answers_with_dry_equal_the_definition(place):
    prompts = [repetitive(number) for number in range(len(DRY))]
    async with running(FOLDER) as served:
        sent = [
            text_request(ids, 24, ignore_eos=True, dry_breakers=breakers(), **rules) for ids, rules in zip(prompts, DRY)
        ]
        plain = [text_request(ids, 24, ignore_eos=True) for ids in prompts]
        got = await asyncio.gather(*[answer(served, each) for each in sent + plain])
    wanted = [said(ids.tolist(), 24, **rules) for ids, rules in zip(prompts, DRY)]
    assert [choices[0] for choices in got[: len(DRY)]] == wanted
    assert sum(choices[0] != others[0] for choices, others in zip(got, got[len(DRY) :])) >= 3, "DRY changes answers"


EVERYTHING = {"dry_multiplier": 1.0, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.02}
EVERYTHING |= {"temperature": 1.0, "repetition_penalty": 1.1, "logit_bias": ((7, 1.0),)}


@pytest.mark.parametrize(
    "rules", [{"dry_multiplier": 2.0, "dry_allowed_length": 1}, EVERYTHING], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("place", PLACES, indirect=True)
async def test_answers_are_equal_alone_cached_chunked_together_and_preempted(place, rules):
    async with running(FOLDER, device="cpu", dtype="float32", **TIGHT) as served:
        rules = {"dry_breakers": breakers(), "logprobs": 2, **rules}
        watched = drawn(3, 12, (20, 60), 10, seed=1, **rules)
        watched = [replace(each, sampling=replace(each.sampling, seed=5)) for each in watched]
        await same_in_every_circumstance(served, watched, drawn(12, 90, (1, 40), 20, seed=2, **rules))


@pytest.mark.parametrize("place", PLACES, indirect=True)
async def test_choices_of_a_request_draw_separately(place):
    rules = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "xtc_probability": 0.5, "xtc_threshold": 0.01}
    rules |= {"dry_multiplier": 1.0, "dry_breakers": breakers(), "top_n_sigma": 2.0}
    async with running(FOLDER) as served:
        three = await answer(served, text_request(repetitive(1), 12, n=3, **rules))
        single = [
            (await answer(served, text_request(repetitive(1), 12, **{**rules, "seed": 3 + k})))[0] for k in range(3)
        ]
    assert three == single
    assert len(set(map(tuple, three))) == 3


async def test_wrong_values_are_refused_by_name_with_what_is_allowed():
    bad = [
        ({"top_n_sigma": -0.1}, "top_n_sigma"), ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"xtc_threshold": float("nan"), "xtc_probability": 0.5}, "xtc_threshold"),
        ({"dry_multiplier": 101.0}, "dry_multiplier"), ({"dry_multiplier": 1.0, "dry_base": 0.5}, "dry_base"),
        ({"dry_multiplier": 1.0, "dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_multiplier": 1.0, "dry_penalty_last_n": MAX_HISTORY + 1}, "dry_penalty_last_n"),
        ({"dry_multiplier": 1.0, "dry_breakers": b"\0"}, "dry_breakers"),
    ]  # fmt: skip
    async with running(FOLDER) as served:
        for rules, name in bad:
            with pytest.raises(RequestError, match=name):
                served.submit(text_request([3, 4], 2, **{"dry_breakers": breakers(), **rules}))


@pytest.mark.parametrize("period", [1, 3, 100])
def test_a_hostile_prompt_of_32k_tokens_takes_one_window(period):
    """Every place repeats the end of the text: state and list stay within the window, whatever the prompt's length."""
    prompt = np.resize(np.arange(7, 7 + period, dtype=np.int32), 32768)
    params = SamplingParams(dry_multiplier=1.0, dry_breakers=bytes(25))
    made = DryHistory(params, prompt, 200, history_for(40960))
    assert made.window == MAX_HISTORY
    for place in range(len(prompt), len(prompt) + 3):
        made.record(7 + place % period)
    lags = made.line[HEAD_LEN:].reshape(PARTS, -1)[1]
    assert len(lags) == MAX_HISTORY
    assert 0 < made.line[0] <= MAX_HISTORY // period
    logits = torch.zeros(200)
    made.apply(logits)
    assert (logits < 0).sum() == 1
    assert logits.isfinite().all()
