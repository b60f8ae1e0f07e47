"""Models with states on the accelerator's path: records, graphs, padded steps, folds of 16 positions.

Answers must equal the answers of the host's backend, which folds one position at a time.
"""

import asyncio
from collections import Counter

import numpy as np
import pytest

import engine.run.start
from engine.base.config import StateConfig
from engine.kernels.state import delta_rule
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_drafts import ngram
from tests.engine_kit import answer, quiet, running, text_request
from tests.invariance.devices import Device
from tests.invariance.test_states import PROMPTS, answers, request

NAMES = ("qwen3_5_text-states", pytest.param("mamba2", marks=pytest.mark.full))
ROOM = {"num_gpu_blocks_override": 3000, "max_model_len": 160}


@pytest.fixture
def on_accelerator(monkeypatch):
    """A function: engines that start after its call take the device's path."""

    def take() -> None:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())

    return take


@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 7, "states": StateConfig("all", 16)}])
@pytest.mark.parametrize("name", NAMES)
async def test_answers_are_those_of_the_host(name, settings, on_accelerator):
    wanted = [each.tokens for each in await asyncio.to_thread(answers, name, Device("cpu"))]
    on_accelerator()
    async with running(tiny.checkpoint(name), debug_poison=True, **ROOM, **settings) as served:
        for _ in range(2):
            got = await asyncio.gather(*[answer(served, request(prompt)) for prompt in PROMPTS])
            assert [choices[0] for choices in got] == wanted
            await quiet(served)
        assert served.stats.prefix_hits > 0


async def test_long_answers_fold_again_and_again(on_accelerator):
    name = "qwen3_5_text-states"
    asked = [text_request(prompt[:20], 120, ignore_eos=True) for prompt in PROMPTS[:4]]
    async with running(tiny.checkpoint(name), **ROOM) as served:
        wanted = [(await answer(served, each))[0] for each in asked]
    on_accelerator()
    async with running(tiny.checkpoint(name), debug_poison=True, **ROOM) as served:
        got = await asyncio.gather(*[answer(served, each) for each in asked])
        assert [choices[0] for choices in got] == wanted


async def test_steps_that_only_verify_drafts_scan_nothing(on_accelerator, monkeypatch):
    """Their graphs launch no scan, so every row must fit in its tail."""
    rule, steps = delta_rule.delta_rule_on_host, Counter()

    def checked(projected, weights, shape, cache, meta):
        count, held = meta.query_start.diff(), meta.start - meta.base
        fits = (count == 0) | ((held + count <= shape.ring) & (meta.checkpoint_run[:, 0] == 0))
        assert fits.all() or not meta.decode_only
        steps["scans" if not fits.all() else "verifies" if meta.decode_only and (count > 1).any() else "other"] += 1
        return rule(projected, weights, shape, cache, meta)

    monkeypatch.setattr(delta_rule, "delta_rule_on_host", checked)
    requests = [text_request(np.tile(np.arange(5 + k, 14 + k), 5), 40, ignore_eos=True) for k in range(3)]
    async with running(tiny.checkpoint("qwen3_5_text-states"), **ROOM) as served:
        wanted = [(await answer(served, each))[0] for each in requests]
    on_accelerator()
    async with running(tiny.checkpoint("qwen3_5_text-states"), speculative=ngram(6), **ROOM) as served:
        steps.clear()
        got = await asyncio.gather(*[answer(served, each) for each in requests])
        assert [choices[0] for choices in got] == wanted
    assert steps["verifies"] > 5
    assert steps["scans"] > 0
