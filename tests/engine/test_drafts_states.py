"""Drafts over recurrent layers: a refused draft leaves nothing in a state, whatever else happens to its row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.base.config import StateConfig
from engine.cache.layout import CacheLayout
from engine.layers.states import set_states
from engine.models.registry import build_model, load_model_config
from tests import tiny
from tests.engine.test_drafts import FEW_PATHS, ONE_PATH, check, collected, drafts_of, ngram, on_path, requests_of
from tests.engine_kit import running, text_request

__all__ = ["on_path"]
NAME = "qwen3_5_text-states"
ROOM = {"num_gpu_blocks_override": 6000}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_prefill_chunk": 7, "max_num_batched_tokens": 48, "states": StateConfig(mode="all", every=32, share=0.9)},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [3, pytest.param(7, marks=pytest.mark.full), 20])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "chunks"])
@pytest.mark.parametrize("on_path", FEW_PATHS, indirect=True)
async def test_answers_are_those_without_drafts(on_path, settings, most):
    requests, hits = requests_of(most, 12, 60), []
    async with running(tiny.checkpoint(NAME), **ROOM, **settings) as own:
        wanted = await collected(own, requests)
    async with running(tiny.checkpoint(NAME), speculative=ngram(most), debug_poison=True, **ROOM, **settings) as own:
        for step in (1, 3):
            check(await collected(own, requests[::step]), wanted[::step])
            hits.append(own.stats.prefix_hits)
        assert 0 < drafts_of(own).num_accepted_tokens < drafts_of(own).num_draft_tokens
        assert hits[1] > hits[0]


def blocks_of_two_rows(drafts: int) -> int:
    """Blocks for the states of two rows on a CPU, and a few tokens."""
    model = build_model(load_model_config(tiny.checkpoint(NAME)), torch.float32, "cpu", None)
    set_states(model, StateConfig(), True, drafts)
    runs = CacheLayout(model.cache_specs(), 16).runs
    assert runs is not None
    return 2 * runs.row_blocks + 12


async def test_a_preempted_row_goes_on_from_a_state_of_accepted_tokens():
    requests = [text_request(np.tile(np.arange(5 + k, 14 + k), 4), 40 + 6 * k, ignore_eos=True) for k in range(8)]
    async with running(tiny.checkpoint(NAME), **ROOM) as own:
        wanted = await collected(own, requests)
    tight = {"num_gpu_blocks_override": blocks_of_two_rows(3), "max_model_len": 200, "max_num_seqs": 4}
    async with running(tiny.checkpoint(NAME), speculative=ngram(3), debug_poison=True, **tight) as own:
        check(await collected(own, requests), wanted)
        assert own.stats.preemptions > 0
        assert drafts_of(own).num_accepted_tokens > 0


@pytest.mark.parametrize("on_path", ONE_PATH, indirect=True)
async def test_an_answers_states_are_found_as_without_drafts(on_path):
    """The next turn of a conversation begins at a state that only accepted tokens are in."""
    settings = {**ROOM, "states": StateConfig(mode="all", every=16)}
    found = []
    for given in ({}, {"speculative": ngram(6)}):
        async with running(tiny.checkpoint(NAME), debug_poison=True, **settings, **given) as own:
            ids = np.tile(np.arange(5, 14), 4)
            for _ in range(3):
                (((tokens, _, _),),) = await collected(own, [text_request(ids, 60, ignore_eos=True)])
                ids = np.concatenate([ids, tokens])
            found.append((ids.tolist(), own.stats.prefix_hits))
            if given:
                assert drafts_of(own).num_accepted_tokens > 60
    assert found[0] == found[1]
