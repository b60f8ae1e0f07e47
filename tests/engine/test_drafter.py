"""EAGLE-3 drafters: answers are those without drafts, and drafts are those of the same drafter in plain torch."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.run.start
from engine import Engine
from engine.base.errors import ConfigError
from engine.sampling.device import DeviceSampler
from engine.sampling.sampler import Sampler
from tests import drafters, tiny
from tests.drafters import PROMPTS, Form
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_drafts import FEW_PATHS, FEW_SETTINGS, PATHS, compare_answers, drafts_of, on_path, requests_of
from tests.engine_kit import answer, running, text_request

__all__ = ["on_path"]
TARGET = "qwen3"
FORMS = {
    "flat": Form(),
    "flat-3.1": Form(options={"fc_norm": True, "norm_output": True}, streams=(1, 2)),
    # Its layer has more bytes than one of the target's.
    "speculators": Form("speculators", {"norm_before_residual": True}, own_embedding=True, maps=False, kv_heads=4),
    "flat-layers": Form(layers=2, joins=False),
    "speculators-layers": Form("speculators", {"norm_before_residual": True}, layers=3, maps=False),
    "parallel": Form(parallel=True),
    "speculators-parallel": Form("speculators", {"norm_before_fc": True}, layers=2, parallel=True),
    "speculators-3.1": Form("speculators", {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}),
}


@functools.cache
def target() -> Any:
    return tiny.reference(tiny.checkpoint(TARGET))


@functools.cache
def text(number: int) -> tuple[int, ...]:
    """A prompt with the target's answer of 30 tokens."""
    return tuple(drafters.greedy(target(), PROMPTS[number], 30))


def asked(most: int, form: str = "flat", **more: Any) -> dict[str, Any]:
    return {"model": str(drafters.eagle3(TARGET, FORMS[form])), "num_speculative_tokens": most, **more}


def steps_of(number: int, most: int, form: str) -> list[tuple[int, int, int]]:
    """The steps of an answer, by the drafter in plain torch."""
    full, own = list(text(number)), FORMS[form]
    drafter = drafters.oracle(drafters.eagle3(TARGET, own), target(), own)
    with torch.inference_mode():
        features = drafter.feature(drafters.streams_of(target(), full, own))
    return drafters.steps_of(full, len(PROMPTS[number]), most, lambda known, k: drafter.propose(known, features, k))


def expected(number: int, most: int, form: str) -> tuple[int, int, int]:
    """Steps with drafts, drafts, and right drafts of an answer, by the drafter in plain torch."""
    return drafters.summed(steps_of(number, most, form))


async def counts(own: Engine, number: int) -> tuple[int, int, int]:
    """The same of an answer of the server, which must be the target's."""
    before = numbers(own)
    (tokens,) = await answer(own, text_request(PROMPTS[number], 30, ignore_eos=True))
    assert tokens == list(text(number)[len(PROMPTS[number]) :])
    steps, drafts, right = (now - then for now, then in zip(numbers(own), before))
    return steps, drafts, right


def numbers(own: Engine) -> tuple[int, int, int]:
    drafts = drafts_of(own)
    return drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens


SHORT = ("flat", "flat-3.1", "speculators-layers", "speculators-3.1")  # the other forms are in the next test
FEW_FORMS = [pytest.param(form, marks=() if form in SHORT else pytest.mark.full) for form in FORMS]


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in SHORT else pytest.mark.full) for form in FORMS]
)
async def test_drafts_are_those_of_the_drafter_in_plain_torch(form, most):
    async with running(tiny.checkpoint(TARGET), speculative=asked(most, form)) as own:
        for number in range(2):
            wanted = expected(number, most, form)
            assert wanted[2] >= 10, "a drafter that is never right would not show an error"
            assert await counts(own, number) == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("form", "settings"), [("speculators", {}), ("flat-layers", {"max_prefill_chunk": 3}), ("parallel", {})]
)
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_every_path_drafts_alike(on_path, form, settings):
    async with running(tiny.checkpoint(TARGET), speculative=asked(3, form), **settings) as own:
        assert await counts(own, 0) == expected(0, 3, form)


@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_a_cached_prefix_changes_neither_hits_nor_drafts(on_path):
    """The second prompt ends with a cached block; its first entry reads the feature that lies with the block."""
    first, more = list(text(0))[:33], list(text(0))[33:]
    request = text_request(first, len(more), ignore_eos=True)
    found = []
    for speculative in ({}, asked(4)):
        async with running(tiny.checkpoint(TARGET), speculative=speculative) as own:
            (once,) = await answer(own, request)
            drafted = numbers(own)
            (again,) = await answer(own, request)
            assert once == again == more
            found.append(own.stats.prefix_hits)
            assert tuple(now - then for now, then in zip(numbers(own), drafted)) == drafted
    assert found[0] == found[1] == 32


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("settings", FEW_SETTINGS)
@pytest.mark.parametrize("on_path", FEW_PATHS, indirect=True)
async def test_answers_are_those_without_drafts(on_path, settings, most):
    requests = [*requests_of(most, 12, 24), *(text_request(ids, 30, ignore_eos=True) for ids in PROMPTS[:2])]
    await compare_answers(tiny.checkpoint(TARGET), asked(most), requests, settings)


@pytest.mark.parametrize("path", [Sampler, DeviceSampler])
async def test_a_guess_has_the_number_of_the_token_that_it_may_become(path, monkeypatch):
    """So a draw takes the noise with which the row itself will draw there."""
    if path is DeviceSampler:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _: HostAccelerator())
    asked_for, guess = [], path.guess

    def noted(self, logits, slots, run, place):
        if int((run >= 0).sum()):
            asked_for.append(int(place[run >= 0][0]))
        return guess(self, logits, slots, run, place)

    monkeypatch.setattr(path, "guess", noted)
    async with running(tiny.checkpoint(TARGET), speculative=asked(3)) as own:
        await counts(own, 0)
    places = [step + j for step, count, _ in steps_of(0, 3, "flat") for j in range(count)]
    assert asked_for[: len(places)] == places


async def test_a_drafter_with_invalid_numbers_changes_no_answer(tmp_path):
    def large(tensors):
        tensors["lm_head.weight"].fill_(1e30)
        tensors["norm.weight"].fill_(1e20)

    folder = copy_of("flat", tmp_path, large)
    async with running(tiny.checkpoint(TARGET), speculative=asked(3, model=str(folder))) as own:
        await counts(own, 0)


def copy_of(form: str, folder: Path, change: Any = None, config: dict[str, Any] | None = None) -> Path:
    """A drafter's folder with other tensors, or other values in config.json."""
    shutil.copytree(drafters.eagle3(TARGET, FORMS[form]), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **(config or {})}))
    return folder


def shifted(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = 200


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (lambda tensors: tensors.pop("norm.weight"), {}, "1 missing: norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), {}, "1 left over: extra"),
        (lambda tensors: tensors.pop("d2t"), {}, "1 missing: d2t"),
        (shifted, {}, "d2t[249]=200 leads to token 449; the target has tokens 0 to 319"),
        (None, {"hidden_size": 80, "target_hidden_size": 64}, "has shape [64, 192], the configuration asks for"),
        (None, {"hidden_size": 80}, "the drafter reads hidden states of 80 numbers; the target makes 64"),
        (None, {"vocab_size": 300}, "vocab_size=300, but the target has 320 tokens"),
        (None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}, "[1, 4]: the target has 3 layers"),
        (None, {"eagle_config": {"use_aux_hidden_state": False}}, "1 left over: fc.weight"),
        (
            None,
            {"use_aux_hidden_state": False, "hidden_size": 80, "target_hidden_size": 64},
            "use_aux_hidden_state=false with hidden_size=80",
        ),
        (None, {"num_hidden_layers": 2}, "9 missing: layers.1."),
        (None, {"model_type": "qwen3"}, "model_type='qwen3' of a drafter"),
        (None, {"architectures": ["LlamaForCausalLM"]}, "10 missing: embed_tokens.weight"),
        (None, {"speculators_model_type": "hydra"}, "speculators_model_type='hydra' is not supported; supported are"),
        (None, {"speculators_model_type": ["eagle3"]}, "speculators_model_type=['eagle3'] is not supported"),
        (None, {"architectures": 1}, "architectures=1 must be a list"),
        (None, {"eagle_config": [1]}, "eagle_config must be an object, got list"),
        (None, {"speculators_config": "x"}, "speculators_config must be an object, got str"),
        (None, {"quantization_config": {"quant_method": "fp8"}}, "quantized drafters are not supported"),
        (None, {"parallel_drafting": True}, "mask_token_id is missing; it names the token of the masks"),
        (None, {"parallel_drafting": True, "ptd_token_id": 320}, "ptd_token_id=320 must be an integer from 0 to 319"),
        (None, {"parallel_drafting": True, "mask_token_id": 3}, "1 missing: mask_hidden"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_by_name(tmp_path, change, config, words):
    folder = copy_of("flat", tmp_path, change, config)
    with pytest.raises(ConfigError, match=re.escape(words)):
        async with running(tiny.checkpoint(TARGET), speculative=asked(3, model=str(folder))):
            pass


async def test_a_drafter_with_another_tokenizer_is_refused(tmp_path):
    folder = copy_of("flat", tmp_path)
    tokenizer = json.loads((tiny.checkpoint(TARGET) / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].pop(next(iter(tokenizer["model"]["vocab"])))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another vocabulary than the target's"):
        async with running(tiny.checkpoint(TARGET), speculative=asked(3, model=str(folder))):
            pass


async def test_files_decide_the_number_of_drafts_and_a_head_without_layers_reads_the_usual_streams(tmp_path, caplog):
    folder = copy_of("flat", tmp_path, config={"eagle_config": None})
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        async with running(tiny.checkpoint(TARGET), speculative={"model": str(folder)}):
            pass
    with caplog.at_level("WARNING"):
        async with running(tiny.checkpoint(TARGET), speculative=asked(2, model=str(folder))) as own:
            await counts(own, 0)
    assert "names no layers: the drafter reads the inputs of the target's layers 2, 1, 1" in caplog.text
    method = {"model": str(drafters.eagle3(TARGET, FORMS["speculators"]))}
    async with running(tiny.checkpoint(TARGET), speculative=method) as own:
        assert len(np.flatnonzero(drafts_of(own).accepted_per_place)) == 0
        await counts(own, 0)
        assert own.inspect().runtime.sizes.num_drafts == 3
