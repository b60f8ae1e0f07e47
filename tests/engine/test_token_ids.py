"""Token ids outside the vocabulary that pass the check of requests: their row ends, no other row changes (S25, S38).

Each case runs on the CPU's executor, on the device's executor with CPU tensors (tests/engine/host_accelerator), and on
a GPU if there is one.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import engine.engine
import engine.run.start
from engine import Engine, FinishReason, Request
from engine.base.errors import TokenIdError
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, prompts, running, text_request

QWEN3 = tiny.checkpoint("qwen3")
PROMPTS = prompts(6, tiny.FIRST_SPECIAL, seed=11, longest=80)
BAD = (-(2**31), -1, tiny.VOCAB_SIZE, 2**31 - 1)
RULES = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"repetition_penalty": 1.3, "logprobs": 3},
    {"prompt_logprobs": 2},
    {"bad_words": ((7,), (30, 31))},
)


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


@pytest.fixture(params=["host", "device", pytest.param("cuda", marks=CUDA)])
def unchecked(request, monkeypatch):
    """Settings of an engine whose requests reach the executor unchecked."""
    if request.param == "device":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    monkeypatch.setattr(engine.engine, "check", lambda request, limits: None)
    return {"device": "cuda", "deterministic": True} if request.param == "cuda" else {}


def broken(place: int, bad: int, **more) -> Request:
    """A prompt of 60 tokens, one of which is not in the vocabulary."""
    ids = prompts(1, tiny.FIRST_SPECIAL, seed=place, longest=1)[0].repeat(60) + np.arange(60, dtype=np.int32)
    ids[place] = bad
    return text_request(ids, 12, ignore_eos=True, **more)


async def ends(engine: Engine, request: Request) -> list:
    """The last Delta of each choice; no choice may have had a token."""
    last = {}
    async with engine.submit(request) as stream:
        async for delta in stream:
            assert not delta.token_ids
            assert delta.logprobs is None
            last[delta.index] = delta
    return [last[choice] for choice in range(request.n)]


def good() -> list[Request]:
    return [text_request(ids, 12, ignore_eos=True, **rules) for ids, rules in zip(PROMPTS, RULES * 2)]


@pytest.mark.parametrize("chunk", [0, 7])
async def test_only_the_row_with_the_id_ends(unchecked, chunk, caplog):
    async with running(QWEN3, max_num_seqs=8, max_prefill_chunk=chunk, **unchecked) as served:
        wanted = [await answer(served, each) for each in good()]
        for round_ in range(4):
            places = (0, 30, 59)
            bad = [broken(at, BAD[(round_ + k) % 4], **RULES[(round_ + k) % 5]) for k, at in enumerate(places)]
            sent = [answer(served, each) for each in good()]
            failed = [ends(served, each) for each in bad]
            got = await asyncio.gather(*failed, *sent)
            assert got[len(bad) :] == wanted
            for (last,) in got[: len(bad)]:
                assert last.finish_reason is FinishReason.ERROR
                assert isinstance(last.error, TokenIdError)
                assert f"{tiny.VOCAB_SIZE} embedding rows" in str(last.error)
        assert served.stats.failed_steps == 0
        assert "embedding rows" in caplog.text
        # Other requests get their slots.
        assert [await answer(served, each) for each in good()] == wanted


async def test_every_choice_of_such_a_request_ends(unchecked):
    async with running(QWEN3, max_prefill_chunk=16, **unchecked) as served:
        for last in await ends(served, broken(3, -7, n=3)):
            assert isinstance(last.error, TokenIdError)


async def test_its_prefix_is_not_found_again(unchecked):
    async with running(QWEN3, max_prefill_chunk=16, **unchecked) as served:
        for _ in range(2):
            (last,) = await ends(served, broken(3, tiny.VOCAB_SIZE))
            assert isinstance(last.error, TokenIdError)
