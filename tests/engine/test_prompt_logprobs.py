"""Prompt log-probabilities: a step computes them for all its requests together, with the same values as alone.

The tests count the rows of the head's products and the copies to the host. Each case runs on the CPU's executor, on the
device's executor with CPU tensors (tests/engine/host_accelerator), and on a GPU if there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch

import engine.run.start
import engine.sampling.pending
from engine import Engine, Request
from engine.layers.embed import Head
from engine.sampling.logprobs import CHUNK
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, answer_deltas, prompts, quiet, running, text_request

QWEN3 = tiny.checkpoint("qwen3")
ALIKE = np.random.default_rng(7).integers(2, tiny.FIRST_SPECIAL, (32, 20), dtype=np.int32)
MIXED = prompts(24, tiny.FIRST_SPECIAL, seed=11, longest=150)
RULES = (
    {"prompt_logprobs": 3},
    {"prompt_logprobs": 0, "logprobs": 2},
    {},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": 20, "temperature": 0.9, "seed": 3},
    {"prompt_logprobs": 300},
)
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


@pytest.fixture(params=["host", "eager", "graphs", pytest.param("cuda", marks=CUDA)])
def settings(request, monkeypatch):
    """Settings of an engine in which other requests never change a bit."""
    if request.param == "cuda":
        return {"device": "cuda", "deterministic": True}
    if request.param == "host":
        return {}
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    return {"enforce_eager": request.param == "eager"}


@pytest.fixture
def products(monkeypatch):
    """Number of rows of each product of the head, in order."""
    seen, real = [], Head.__call__

    def counted(head, hidden):
        seen.append(len(hidden))
        return real(head, hidden)

    monkeypatch.setattr(Head, "__call__", counted)
    return seen


@pytest.fixture
def copies(monkeypatch):
    """Bytes of the copies for prompts, to the device ("send") and to the host ("home")."""
    seen = {"send": [], "home": []}

    def counted(name: str, real: Callable) -> Callable:
        def call(values, *where):
            seen[name].append(values.nbytes)
            return real(values, *where)

        return call

    for name in seen:
        monkeypatch.setattr(engine.sampling.pending, name, counted(name, getattr(engine.sampling.pending, name)))
    return seen


async def at_once(served: Engine, requests: list[Request]) -> list[tuple]:
    """Each request's answer; all requests have arrived when the first step is planned."""
    served.pause()
    answers = [asyncio.ensure_future(collected(served, request)) for request in requests]
    await asyncio.sleep(0)  # they have been sent
    served.resume()
    return await asyncio.gather(*answers)


async def collected(served: Engine, request: Request) -> tuple:
    deltas = (await answer_deltas(served, request))[0]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[0].prompt_logprobs, [entry for delta in deltas for entry in delta.logprobs or ()]


def mixed(number: int) -> Request:
    return text_request(MIXED[number], 3, ignore_eos=True, **RULES[number % len(RULES)])


async def test_many_short_prompts_share_a_steps_products_and_copies(settings, products, copies):
    sent = [text_request(ids, 1, prompt_logprobs=2 + number % 3) for number, ids in enumerate(ALIKE)]
    async with running(QWEN3, max_num_batched_tokens=512, enable_prefix_caching=False, **settings) as served:
        alone = [await collected(served, request) for request in sent]
        steps = []
        served.on_step = steps.append
        for seen in (products, *copies.values()):
            seen.clear()
        assert await at_once(served, sent) == alone
        await quiet(served)
    sizes = [stats.num_tokens for stats in steps if stats.num_tokens]
    assert sum(sizes) == ALIKE.size
    assert len(sizes) <= 4
    assert len(products) <= sum(-(-size // CHUNK) + 1 for size in sizes)  # and one product that chooses tokens
    assert max(products) <= CHUNK
    if "enforce_eager" in settings or "device" in settings:
        assert len(copies["send"]) == len(copies["home"]) == len(sizes)


@pytest.mark.parametrize("tokens", [64, 256])
async def test_a_prompt_has_the_same_logprobs_in_any_company(settings, tokens):
    """Prompts run in chunks; requests want few, all or none of the likeliest tokens, or other outputs."""
    settings |= {"max_num_batched_tokens": tokens, "max_logprobs": -1, "enable_prefix_caching": False}
    async with running(QWEN3, **settings) as served:
        alone = [await collected(served, mixed(number)) for number in range(len(MIXED))]
        assert await at_once(served, [mixed(number) for number in range(len(MIXED))]) == alone
    for number, (_, prompt, _) in enumerate(alone):
        wanted = RULES[number % len(RULES)].get("prompt_logprobs")
        if wanted is None:
            assert prompt is None
            continue
        assert [entry.token_id for entry in prompt[1:]] == MIXED[number][1:].tolist()
        widths = {len(values) for entry in prompt[1:] for values in (entry.top_ids, entry.top_logprobs)}
        assert widths <= {tiny.VOCAB_SIZE if wanted == -1 else wanted}


async def test_an_abort_in_the_middle_does_not_change_other_requests(settings):
    settings |= {"max_num_batched_tokens": 64, "max_logprobs": -1, "enable_prefix_caching": False}
    async with running(QWEN3, **settings) as served:
        alone = [await collected(served, mixed(number)) for number in range(len(MIXED))]
        begun = asyncio.Event()
        served.on_step = lambda stats: begun.set()
        leaving = [served.submit(text_request(ids, 9, prompt_logprobs=5)) for ids in MIXED[:8]]
        staying = [asyncio.ensure_future(collected(served, mixed(number))) for number in range(len(MIXED))]
        await begun.wait()
        for stream in leaving:
            stream.abort()
        assert await asyncio.gather(*staying) == alone
        assert (await answer(served, mixed(2)))[0] == alone[2][0]
        assert (await quiet(served))["prompt_logprobs"] == 0
