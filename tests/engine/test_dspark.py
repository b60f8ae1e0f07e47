"""DSpark drafters: answers are those without drafts, drafts are those of the drafter in torch, and so is what the
budget of drafts reads."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from _fast.layout import Acceptance
from engine.base.errors import ConfigError
from engine.step.parts import drafter_walk
from tests import block_drafters, drafters, tiny
from tests.block_drafters import Form
from tests.drafters import PROMPTS
from tests.engine.test_dflash import copy_of, expected
from tests.engine.test_drafter import TARGET, counts, target, text
from tests.engine.test_drafts import PATHS, on_path
from tests.engine_kit import running

__all__ = ["on_path"]
HEADS: dict[str, Any] = {"kind": "dspark", "rank": 16}
FORMS = {
    "flat": Form(**HEADS, skipped=0, confident="both", block=7),
    "speculators": Form(
        "speculators",
        **HEADS,
        markov="gated",
        skipped=0,
        confident="hidden",
        own_embedding=True,
        maps=True,
        streams=(1, 2),
        block=7,
    ),
    "recurrent": Form(**HEADS, markov="rnn", skipped=0, confident="both", block=7),
    "own-places": Form(
        "speculators",
        **HEADS,
        markov="rnn",
        confident="both",
        maps=True,
        kinds=("full", "sliding"),
        windows=(0, 6),
        whole=(True, False),
    ),
    "without-heads": Form(kind="dspark", skipped=0, block=7),
}


def asked(most: int, form: str = "flat", **more: Any) -> dict[str, Any]:
    return {"model": str(block_drafters.folder_of(TARGET, FORMS[form])), "num_speculative_tokens": most, **more}


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("form", FORMS)
async def test_drafts_are_those_of_the_drafter_in_torch(form, most):
    async with running(tiny.checkpoint(TARGET), speculative=asked(most, form)) as own:
        for number in range(2):
            wanted = expected(number, most, FORMS[form])
            assert wanted[2] >= 8, "a drafter that is never right would not show an error"
            assert await counts(own, number) == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize(("form", "settings"), [("flat", {}), ("own-places", {"max_prefill_chunk": 3})])
@pytest.mark.parametrize("on_path", PATHS[1:], indirect=True)
async def test_every_path_drafts_alike(on_path, form, settings):
    async with running(tiny.checkpoint(TARGET), speculative=asked(5, form), **settings) as own:
        assert await counts(own, 0) == expected(0, 5, FORMS[form])


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", ["flat", "speculators"])
@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_survivals_are_the_chained_confidences_of_the_drafts_before(on_path, form, monkeypatch):
    found, take = [], drafter_walk.take_confidence

    def noted(rows, confidence):
        take(rows, confidence)
        for row in (rows.drafts > 0).nonzero().flatten().tolist():
            count, slot = int(rows.drafts[row]), int(rows.slots[row])
            found.append(rows.state.survivals.survivals[slot, :count].tolist())

    monkeypatch.setattr(drafter_walk, "take_confidence", noted)
    async with running(tiny.checkpoint(TARGET), speculative=asked(4, form)) as own:
        found.clear()  # of steps at start
        await counts(own, 0)
    drafter, full = block_drafters.taught(TARGET, FORMS[form]), list(text(0))
    streams = drafters.streams_of(target(), full, drafters.Form(streams=FORMS[form].streams))
    wanted: list[list[float]] = []

    def noted_too(known: list[int], count: int) -> list[int]:
        drafts, sure = drafter.proposed(known, streams, count)
        wanted.append(list(itertools.accumulate(sure, lambda a, b: a * b)))
        return drafts

    drafters.steps_of(full, len(PROMPTS[0]), 4, noted_too)
    assert [len(each) for each in found[: len(wanted)]] == [len(each) for each in wanted]
    for mine, theirs in zip(found, wanted):
        assert mine == pytest.approx([Acceptance.ONE * each for each in theirs], abs=6)
    spread = [each[0] for each in wanted]
    assert max(spread) > 1.3 * min(spread), "equal confidences would not show an error"


async def test_a_drafter_with_invalid_numbers_changes_no_answer(tmp_path):
    def large(tensors):
        tensors["markov_head.markov_w1.weight"].fill_(1e20)
        tensors["markov_head.markov_w2.weight"].fill_(1e30)
        tensors["confidence_head.proj.weight"][0, ::2] = 1e30
        tensors["confidence_head.proj.weight"][0, 1::2] = -1e30  # infinity less infinity

    folder = copy_of(tmp_path, large, {}, FORMS["flat"])
    async with running(tiny.checkpoint(TARGET), speculative=asked(3, model=str(folder))) as own:
        await counts(own, 0)


@pytest.mark.parametrize(
    ("change", "config", "most", "words"),
    [
        (lambda tensors: tensors.pop("markov_head.markov_w1.weight"), {}, 3, "1 missing: markov_head.markov_w1.weight"),
        (lambda tensors: tensors.pop("confidence_head.proj.bias"), {}, 3, "1 missing: confidence_head.proj.bias"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), {}, 3, "1 left over: extra"),
        (None, {"markov_rank": 12}, 3, "has shape [320, 16], the configuration asks for [320, 12]"),
        (None, {"markov_rank": 0}, 3, "confidence_head_with_markov=true needs markov_rank above 0"),
        (None, {"enable_confidence_head": False}, 3, "2 left over: confidence_head.proj.bias, "),
        (None, {"confidence_head_with_markov": False}, 3, "[1, 80], the configuration asks for [1, 64]"),
        (
            None,
            {"markov_head_type": "fir"},
            3,
            "markov_head_type='fir' is not supported; supported are ['vanilla', ",
        ),
        (None, {"markov_head_type": "rnn"}, 3, "2 missing: markov_head.joint_proj.weight, "),
        (None, {"markov_head_type": ["rnn"]}, 3, "markov_head_type=['rnn'] is not supported"),
        (None, {"markov_rank": -1}, 3, "markov_rank=-1 must be an integer"),
        (None, {"model_type": "deepseek_v4"}, 3, "model_type='deepseek_v4' of a drafter; supported is 'qwen3'"),
        (None, {"target_layer_ids": [0, 3]}, 3, "target_layer_ids=[0, 3]: the target has 3 layers"),
        (None, {"target_layer_ids": None, "dspark_target_layer_ids": [3]}, 3, "target_layer_ids=[3]: the target has"),
        (None, {"hidden_size": 80}, 3, "the drafter reads hidden states of 80 numbers; the target makes 64"),
        (None, {}, 8, "num_speculative_tokens is 8, but"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_by_name(tmp_path: Path, change, config, most, words):
    folder = copy_of(tmp_path, change, config, FORMS["flat"])
    with pytest.raises(ConfigError, match=re.escape(words)):
        async with running(tiny.checkpoint(TARGET), speculative=asked(most, model=str(folder))):
            pass


async def test_a_block_gives_as_many_drafts_as_it_has_places(tmp_path):
    folder = copy_of(tmp_path, None, {}, FORMS["flat"])
    async with running(tiny.checkpoint(TARGET), speculative={"model": str(folder), "method": "dspark"}) as own:
        assert own.inspect().runtime.sizes.num_drafts == 7
