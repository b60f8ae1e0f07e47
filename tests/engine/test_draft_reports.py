"""Counts of drafts: those of a choice, those of all steps, and drafts of a drafter whose numbers are invalid."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from engine.base.errors import ConfigError
from tests import drafters, tiny
from tests.drafters import Form
from tests.engine.test_drafts import ONE_PATH, ngram, on_path, requests_of
from tests.engine_kit import answer, running, text_request

__all__ = ["on_path"]
TARGET = "qwen3"


class Steps(list):
    """A choice's steps with drafts, as TokenStream.drafted."""

    def add(self, drafts: int, accepted: int) -> None:
        self.append((drafts, accepted))


async def followed(own: Engine, request: Any) -> tuple[Steps, list[int]]:
    """The steps with drafts of an answer, and its tokens."""
    steps = Steps()
    async with own.submit(request) as stream:
        stream.drafted = steps
        tokens = [token async for delta in stream for token in delta.token_ids]
    return steps, tokens


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_each_choice_and_the_totals_have_every_step(on_path):
    """The loop's totals are complete as soon as answers are, also after steps without the GIL."""
    requests = [request for request in requests_of(3, 24) if request.n == 1]
    requests.append(text_request(list(range(5, 14)) * 6, 48, ignore_eos=True))
    async with running(tiny.checkpoint(TARGET), speculative=ngram(3), report_drafts=True) as own:
        found = await asyncio.gather(*[followed(own, request) for request in requests])
        drafts = own.inspect().runtime.scheduler.drafts
        steps = [step for of, _ in found for step in of]
        assert len(steps) == drafts.num_drafts > 10
        assert sum(number for number, _ in steps) == drafts.num_draft_tokens
        assert sum(right for _, right in steps) == drafts.num_accepted_tokens > 0
        assert tuple(own.stats.drafts) == drafts.counts
        for of, tokens in found:
            assert len(of) + sum(right for _, right in of) <= len(tokens) + 3, "a stop may cut the last run"


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_invalid_numbers_of_a_drafter_cost_drafts_and_no_answer(on_path, tmp_path):
    folder = overflowing(tmp_path / "drafter")
    request = text_request(drafters.PROMPTS[0], 24, ignore_eos=True)
    async with running(tiny.checkpoint(TARGET)) as own:
        wanted = await answer(own, request)
    async with running(tiny.checkpoint(TARGET), speculative={"model": str(folder), "num_speculative_tokens": 3}) as own:
        assert await answer(own, request) == wanted
        rows, drafts, right, invalid, _ = own.inspect().runtime.scheduler.drafts.counts
        assert (rows, drafts, right) == (0, 0, 0)
        assert invalid >= 3 * 20
        assert own.stats.drafts.invalid_tokens == invalid


def overflowing(folder: Path) -> Path:
    """A drafter that was never trained, and whose logits are beyond float32."""
    folder.mkdir()
    tensors = drafters.trained(TARGET, Form(maps=False), rounds=0)
    tensors["norm.weight"][:], tensors["lm_head.weight"][:] = 1e7, 1e33
    drafters.write(folder, tensors, Form(maps=False))
    return folder


async def test_a_report_needs_drafts():
    with pytest.raises(ConfigError, match=r"--per-request-spec-decode-metrics.*add --speculative-config"):
        async with running(tiny.checkpoint(TARGET), report_drafts=True):
            pass
