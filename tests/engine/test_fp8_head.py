"""`"quantization": "fp8"`: drafts come from an FP8 copy of the head, answers from the head itself."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.models.base.decoder import Decoder
from engine.models.drafters.small_head import LentHead
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from server import cli
from tests import block_drafters, draft_models, drafters, tiny
from tests.drafters import PROMPTS
from tests.engine import test_dflash, test_draft_model, test_drafter, test_dspark, test_mtp
from tests.engine.test_drafter import TARGET, counts, target, text
from tests.engine.test_drafts import PATHS, drafts_of, on_path
from tests.engine_kit import answer, running, text_request

__all__ = ["on_path"]
FP8 = {"quantization": "fp8"}


def rounded(weight: Tensor) -> Tensor:
    """Rows in FP8, each with its scale, as floats."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_copy_holds_the_rows_of_the_targets_head_in_fp8(name):
    """Of a head in the files, and of one that is the embedding."""
    folder = tiny.checkpoint(name)
    model = build_model(load_model_config(folder), torch.float32, "cpu")
    load_weights(model, str(folder))
    assert isinstance(model, Decoder)
    lent, plain = LentHead(model, True), LentHead(model, False)
    assert lent.copy is not None
    assert plain.copy is None
    lent.copy.load("auto", Placement(torch.float32, "cpu"), 0)
    hidden = torch.randn(5, model.config.text.hidden_size, generator=torch.Generator().manual_seed(2))
    head = tiny.reference(folder).get_output_embeddings().weight.detach()
    torch.testing.assert_close(lent.products(hidden), hidden @ rounded(head).T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(plain.products(hidden), hidden @ head.T, atol=1e-4, rtol=1e-4)
    assert (lent.products(hidden) - plain.products(hidden)).abs().max() > 1e-3
    assert lent.copy.num_bytes < 0.4 * 4 * head.numel()
    torch.testing.assert_close(lent.logits(hidden), model.scaled(lent.products(hidden)))


def of_eagle3(number: int, form: str) -> tuple[int, int, int]:
    """Steps with drafts, drafts, and right drafts of an answer, by the drafter in plain torch with an FP8 head."""
    full, own = list(text(number)), test_drafter.FORMS[form]
    drafter = drafters.oracle(drafters.eagle3(TARGET, own), target(), own)
    drafter.tensors["lm_head.weight"] = rounded(drafter.tensors["lm_head.weight"])
    with torch.inference_mode():
        features = drafter.feature(drafters.streams_of(target(), full, own))
    steps = drafters.steps_of(full, len(PROMPTS[number]), 4, lambda known, k: drafter.propose(known, features, k))
    return drafters.summed(steps)


def of_block(number: int, form: block_drafters.Form) -> tuple[int, int, int]:
    """The same of a block drafter."""
    full, own = list(text(number)), copy.copy(block_drafters.taught(TARGET, form))
    own.head = rounded(own.head.detach())
    streams = drafters.streams_of(target(), full, drafters.Form(streams=form.streams))
    steps = drafters.steps_of(full, len(PROMPTS[number]), 4, lambda known, k: own.propose(known, streams, k))
    return drafters.summed(steps)


@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_drafts_are_those_of_an_eagle3_head_in_fp8(on_path):
    drafts = test_drafter.asked(4, "speculators", **FP8)
    async with running(tiny.checkpoint(TARGET), speculative=drafts) as own:
        for number in range(2):
            assert await counts(own, number) == of_eagle3(number, "speculators")


@pytest.mark.covering(1)
@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
@pytest.mark.parametrize(("kind", "form"), [(test_dflash, "flat"), (test_dspark, "flat"), (test_dspark, "speculators")])
async def test_drafts_are_those_of_a_block_drafter_with_a_head_in_fp8(on_path, kind, form):
    """The target's head, which is copied, and one of the drafter's files."""
    drafts = kind.asked(4, form, **FP8)
    async with running(tiny.checkpoint(TARGET), speculative=drafts) as own:
        for number in range(2):
            assert await counts(own, number) == of_block(number, kind.FORMS[form])


async def test_drafts_of_the_models_own_layer_come_from_the_copy(monkeypatch):
    folder, own_layer = test_mtp.checkpoint(), copy.deepcopy(test_mtp.trained())
    own_layer.shared_head.weight.data = rounded(own_layer.shared_head.weight.detach())
    monkeypatch.setattr(test_mtp, "trained", lambda: own_layer)
    async with running(folder, speculative=test_mtp.asked(3) | FP8) as own:
        (tokens,) = await answer(own, text_request(PROMPTS[0], test_mtp.LENGTH, ignore_eos=True))
        assert tokens == list(test_mtp.text(0)[len(PROMPTS[0]) :])
        drafts = drafts_of(own)
        assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == test_mtp.expected(0, 3)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_a_draft_model_has_an_fp8_head(family):
    """Also a head that is the embedding, whose rows stay as they are."""
    model = copy.deepcopy(draft_models.reference(draft_models.draft_model(TARGET, family)))
    model.lm_head.weight = torch.nn.Parameter(rounded(model.get_output_embeddings().weight.detach()))
    full = list(text(0))

    def propose(known: list[int], count: int) -> list[int]:
        return drafters.greedy(model, known, count)[len(known) :] if count else []

    steps = drafters.steps_of(full, len(PROMPTS[0]), 3, propose)
    async with running(tiny.checkpoint(TARGET), speculative=test_draft_model.asked(3, family, **FP8)) as own:
        assert await test_draft_model.counts(own, 0) == drafters.summed([step for step in steps if step[1]])


def test_check_counts_the_copy(capsys):
    folder = tiny.checkpoint("qwen3")
    words = ["check", str(folder), "--speculative-config"]
    drafts = test_dflash.asked(4) | FP8
    assert cli.main([*words, json.dumps(drafts)]) == 0
    assert "over the inputs of layers 1, 3, with an 8-bit head; weights of" in capsys.readouterr().out
    small = {"model": str(draft_models.draft_model(TARGET)), "num_speculative_tokens": 2, **FP8}
    assert cli.main([*words, json.dumps(small)]) == 0
    assert "up to 256 tokens, with an 8-bit head; weights of" in capsys.readouterr().out


async def test_another_quantisation_of_a_drafter_is_refused():
    with pytest.raises(ConfigError, match=re.escape("quantization is 'awq': a drafter's weights are as in its files")):
        async with running(tiny.checkpoint(TARGET), speculative=test_dflash.asked(4, quantization="awq")):
            pass
