"""Block drafters: answers are those without drafts, and drafts are those of the same drafter in transformers."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine import Engine
from engine.base.errors import ConfigError
from tests import block_drafters, drafters, tiny
from tests.block_drafters import Form
from tests.drafters import PROMPTS
from tests.engine.test_drafter import TARGET, counts, numbers, target, text
from tests.engine.test_drafts import PATHS, on_path
from tests.engine_kit import answer, running, text_request

__all__ = ["on_path"]
FORMS = {
    "flat": Form(),
    "speculators": Form("speculators", own_embedding=True, maps=True, streams=(1, 2)),
    "sliding": Form(kinds=("full", "sliding"), windows=(0, 6), whole=(True, False), mask_embedding=True),
    "swa": Form(options={"use_swa": True, "swa_window_size": 9}, windows=(9, 9)),
    "causal": Form(options={"causal": True, "attention_sink_bias": True}, whole=(False, False), sinks=True),
    "non-causal": Form(
        "speculators", {"sliding_window_non_causal": True}, ("full", "sliding"), windows=(0, 7), maps=True
    ),
}


def asked(most: int, form: str = "flat", **more: Any) -> dict[str, Any]:
    return {"model": str(block_drafters.folder_of(TARGET, FORMS[form])), "num_speculative_tokens": most, **more}


def expected(number: int, most: int, form: Form) -> tuple[int, int, int]:
    """Steps with drafts, drafts, and right drafts of an answer, by the drafter in torch."""
    full, own = list(text(number)), block_drafters.taught(TARGET, form)
    streams = drafters.streams_of(target(), full, drafters.Form(streams=form.streams))
    steps = drafters.steps_of(full, len(PROMPTS[number]), most, lambda known, k: own.propose(known, streams, k))
    return drafters.summed(steps)


async def check_counts(own: Engine, number: int, most: int, form: str) -> None:
    wanted = expected(number, most, FORMS[form])
    assert wanted[2] >= 8, "a drafter that is never right would not show an error"
    assert await counts(own, number) == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("form", FORMS)
async def test_drafts_are_those_of_the_drafter_in_torch(form, most):
    async with running(tiny.checkpoint(TARGET), speculative=asked(most, form)) as own:
        for number in range(2):
            await check_counts(own, number, most, form)


async def test_steps_are_those_of_transformers_generator():
    """Another opinion about the drafter in torch: what the generator of transformers' assisted decoding proposes."""
    from transformers import GenerationConfig
    from transformers.generation import DFlashTokenCandidateGenerator

    form = FORMS["speculators"]
    own = block_drafters.taught(TARGET, form)
    model, full = copy.deepcopy(own.model), list(text(0))
    model.config.update(
        {"target_layer_ids": [number - 1 for number in form.streams], "layer_types": ["full_attention"] * 2}
    )
    model.set_attn_implementation("eager")
    head = nn.Linear(*reversed(own.head.shape), bias=False)
    head.weight = nn.Parameter(own.head)
    parts = model, nn.Embedding.from_pretrained(own.embedding), head

    @torch.no_grad()
    def propose(known: list[int], count: int) -> list[int]:
        model.config.block_size = count + 1
        made = target()(torch.tensor([known[:-1]]), output_hidden_states=True)
        ids = torch.tensor([known])
        given = {"position_ids": torch.arange(len(known))[None], "attention_mask": torch.ones_like(ids)}
        generator = DFlashTokenCandidateGenerator(*parts, GenerationConfig(max_length=512, do_sample=False))
        found, _ = generator.get_candidates(ids, given, made, False, 0)
        return own.tokens[found[0, len(known) :]].tolist()

    async with running(tiny.checkpoint(TARGET), speculative=asked(7, "speculators")) as server:
        steps = drafters.steps_of(full, len(PROMPTS[0]), 7, propose)
        assert await counts(server, 0) == drafters.summed(steps)
        assert len(steps) >= 3


@pytest.mark.covering(1)
@pytest.mark.parametrize(("form", "settings"), [("flat", {}), ("sliding", {"max_prefill_chunk": 3})])
@pytest.mark.parametrize("on_path", PATHS[1:], indirect=True)
async def test_every_path_drafts_alike(on_path, form, settings):
    async with running(tiny.checkpoint(TARGET), speculative=asked(5, form), **settings) as own:
        await check_counts(own, 0, 5, form)


async def test_a_cached_prefix_changes_neither_hits_nor_drafts():
    first, more = list(text(0))[:33], list(text(0))[33:]
    request = text_request(first, len(more), ignore_eos=True)
    async with running(tiny.checkpoint(TARGET), speculative=asked(4)) as own:
        (once,) = await answer(own, request)
        drafted = numbers(own)
        (again,) = await answer(own, request)
        assert once == again == more
        assert own.stats.prefix_hits == 32
        assert tuple(now - then for now, then in zip(numbers(own), drafted)) == drafted


def copy_of(folder: Path, change: Any, config: dict[str, Any], form: Form = FORMS["flat"]) -> Path:
    shutil.copytree(block_drafters.folder_of(TARGET, form), folder, dirs_exist_ok=True)
    block_drafters.changed(folder, change, config)
    return folder


def inner(**values: Any) -> dict[str, Any]:
    given = {"target_layer_ids": [0, 2], "mask_token_id": 3, **values}
    return {"dflash_config": {key: value for key, value in given.items() if value is not None}}


@pytest.mark.parametrize(
    ("change", "config", "most", "words"),
    [
        (lambda tensors: tensors.pop("hidden_norm.weight"), {}, 3, "1 missing: hidden_norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), {}, 3, "1 left over: extra"),
        (None, {"hidden_size": 80}, 3, "the drafter reads hidden states of 80 numbers; the target makes 64"),
        (None, {"vocab_size": 300}, 3, "vocab_size=300, but the target has 320 tokens"),
        (None, {"model_type": "llama"}, 3, "model_type='llama' of a drafter; supported is 'qwen3'"),
        (None, inner(target_layer_ids=[0, 3]), 3, "target_layer_ids=[0, 3]: the target has 3 layers"),
        (None, inner(mask_token_id=None), 3, "mask_token_id is missing"),
        (None, inner(mask_token_id=320), 3, "mask_token_id=320 must be an integer from 0 to 319"),
        (None, inner(use_swa=True), 3, "swa_window_size=None must be an integer"),
        (None, inner(attention_sink_bias=True), 3, "2 missing: layers.0-1.self_attn.sinks"),
        (None, inner(causal=3), 3, "causal=3 must be true or false"),
        (None, {"block_size": None}, 3, "block_size is missing"),
        (None, {}, 8, "num_speculative_tokens is 8, but"),
        (None, {"projector_type": "domino"}, 3, "projector_type='domino'"),
        (None, {"is_neox_style": False}, 3, "is_neox_style=False"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_by_name(tmp_path, change, config, most, words):
    folder = copy_of(tmp_path, change, config)
    with pytest.raises(ConfigError, match=re.escape(words)):
        async with running(tiny.checkpoint(TARGET), speculative=asked(most, model=str(folder))):
            pass


async def test_an_embedding_of_masks_outside_the_safetensors_file_is_refused(tmp_path):
    folder = copy_of(tmp_path, None, {})
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(ConfigError, match="add the embedding to the safetensors file as `mask_embedding`"):
        async with running(tiny.checkpoint(TARGET), speculative=asked(3, model=str(folder))):
            pass


async def test_files_decide_the_number_of_drafts_and_without_layers_the_usual_streams_are_read(tmp_path, caplog):
    folder = copy_of(tmp_path, None, inner(target_layer_ids=None))
    with caplog.at_level("WARNING"):
        async with running(tiny.checkpoint(TARGET), speculative={"model": str(folder)}) as own:
            assert own.inspect().runtime.sizes.num_drafts == 7
            await counts(own, 0)
    assert "names no layers: the drafter reads the inputs of the target's layers 2, 1," in caplog.text
