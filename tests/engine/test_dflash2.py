"""DFlash2 drafters: answers are those without drafts, and drafts are those of the same drafter in torch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from engine.base.errors import ConfigError
from tests import block_drafters, tiny
from tests.block_drafters import Form
from tests.engine.test_dflash import copy_of, expected
from tests.engine.test_drafter import TARGET, counts
from tests.engine.test_drafts import PATHS, on_path
from tests.engine_kit import running

__all__ = ["on_path"]
PARTS: dict[str, Any] = {"kind": "dflash2", "rank": 16}
FORMS = {
    "flat": Form(**PARTS, taps=2, options={"selector_top_k": 12, "is_causal": False}),
    "scaled": Form(
        **PARTS, taps=3, kinds=("full", "sliding"), windows=(0, 6), whole=(True, False), streams=(1, 2),
        options={"selector_top_k": 5, "output_multiplier": 0.7, "final_logit_softcapping": 3.0,
                 "input_embedding_scale": 1.5},
    ),
    "speculators": Form(
        "speculators", **PARTS, taps=2, kinds=("full", "sliding"), windows=(0, 7), own_embedding=True,
        options={"selector_top_k": 8},
    ),
}  # fmt: skip


def asked(most: int, form: str = "flat", **more: Any) -> dict[str, Any]:
    return {"model": str(block_drafters.folder_of(TARGET, FORMS[form])), "num_speculative_tokens": most, **more}


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("form", FORMS)
async def test_drafts_are_those_of_the_drafter_in_torch(form, most):
    async with running(tiny.checkpoint(TARGET), speculative=asked(most, form, method="dflash")) as own:
        for number in range(2):
            wanted = expected(number, most, FORMS[form])
            assert wanted[2] >= (4 if most == 1 else 8), "a drafter that is never right would not show an error"
            assert await counts(own, number) == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize(("form", "settings"), [("flat", {}), ("scaled", {"max_prefill_chunk": 3})])
@pytest.mark.parametrize("on_path", PATHS[1:], indirect=True)
async def test_every_path_drafts_alike(on_path, form, settings):
    async with running(tiny.checkpoint(TARGET), speculative=asked(5, form), **settings) as own:
        assert await counts(own, 0) == expected(0, 5, FORMS[form])


async def test_a_drafter_with_invalid_numbers_changes_no_answer(tmp_path):
    def large(tensors):
        tensors["candidate_selector.predecessor_codebook"].fill_(1e20)
        tensors["candidate_selector.successor_codebook"].fill_(1e30)

    folder = copy_of(tmp_path, large, {}, FORMS["flat"])
    async with running(tiny.checkpoint(TARGET), speculative=asked(3, model=str(folder))) as own:
        await counts(own, 0)


def inner(**values: Any) -> dict[str, Any]:
    usual = {"target_layer_ids": [0, 2], "mask_token_id": 3, "conv_kernel_size": 2, "conv_group_size": 16}
    given = {**usual, "selector_rank": 16, "selector_top_k": 12, "is_causal": False, **values}
    return {"dflash_config": {key: value for key, value in given.items() if value is not None}}


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (lambda tensors: tensors.pop("layers.1.mlp_conv.base_kernel"), {}, "1 missing: layers.1.mlp_conv.base_kernel"),
        (
            lambda tensors: tensors.pop("layers.0.attention_conv.kernel_projection.weight"),
            {},
            "1 missing: layers.0.attention_conv.kernel_projection.weight",
        ),
        (
            lambda tensors: tensors.pop("candidate_selector.successor_codebook"),
            {},
            "1 missing: candidate_selector.successor_codebook",
        ),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), {}, "1 left over: extra"),
        (None, inner(conv_kernel_size=3), "has shape [2, 2, 64], the configuration asks for [2, 3, 64]"),
        (None, inner(conv_kernel_size=9), "conv_kernel_size=9 must be an integer from 1 to 8"),
        (None, inner(conv_kernel_size=None), "conv_kernel_size is missing"),
        (None, inner(conv_group_size=48), "conv_group_size=48 must divide hidden_size=64"),
        (None, inner(selector_rank=8), "has shape [320, 16], the configuration asks for [320, 8]"),
        (None, inner(selector_top_k=321), "selector_top_k=321 must be an integer from 1 to 320"),
        (None, {"draft_vocab_size": 250}, "draft_vocab_size=250: the selector of DFlash2 counts the target's 320"),
        (None, {"architectures": ["DFlashDraftModel"]}, "11 left over: candidate_selector.hidden_projection.weight"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_by_name(tmp_path, change, config, words):
    folder = copy_of(tmp_path, change, config, FORMS["flat"])
    with pytest.raises(ConfigError, match=re.escape(words)):
        async with running(tiny.checkpoint(TARGET), speculative=asked(3, model=str(folder))):
            pass
