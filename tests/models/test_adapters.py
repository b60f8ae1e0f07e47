"""Checkpoints with adapters: which rows use which adapter, against transformers; memory; quantised weights."""

from __future__ import annotations

import asyncio
import copy
import functools
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import engine.run.start
from engine.base.config import EngineConfig
from engine.base.request import Request, SamplingParams
from engine.models.registry import build_model, load_model_config
from engine.run.estimate import estimate
from engine.weights.files import open_checkpoint
from engine.weights.load import load_weights, match, weight_bytes
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.models.harness import load
from tests.models.test_sounds import FAMILY, request, wanted
from tests.tiny_sounds import Sounds

NAMES = ("phi4mm", "granite-speech-3.3")
TOKENS, SOUND = 24, (20000, 1500)
TEXTS = tuple(tuple(np.random.default_rng(length).integers(2, 60, length).tolist()) for length in (7, 40, 61))
each_family = pytest.mark.parametrize("family", [FAMILY[name] for name in NAMES], ids=NAMES)


@functools.cache
def base_oracle(family: Sounds) -> torch.nn.Module:
    """transformers' model with the checkpoint's base matrices, without adapters."""
    stored = load_file(family.folder / "model.safetensors")
    model = copy.deepcopy(family.oracle)
    for name, parameter in model.named_parameters():
        for old, new in (
            ("", ""),
            (r"^model\.language_model\.", "language_model.model."),
            (r"\.weight$", ".base_layer.weight"),
        ):
            if (tensor := stored.get(re.sub(old, new, name))) is not None and tensor.shape == parameter.shape:
                parameter.data.copy_(tensor)
    return model


@functools.cache
def wanted_of_text(family: Sounds, ids: tuple[int, ...], adapted: bool = False) -> list[int]:
    """Greedy tokens of transformers: of the base matrices, or with `adapted` of the adapted ones."""
    with torch.inference_mode():
        made = (family.oracle if adapted else base_oracle(family)).generate(
            torch.tensor([ids]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None
        )
    return made[0, -TOKENS:].tolist()


def text(ids: tuple[int, ...]) -> Request:
    return Request(np.array(ids, np.int32), SamplingParams(TOKENS, 0.0, ignore_eos=True))


async def check(family: Sounds, **settings):
    """Texts and sounds in the same steps, twice; before them texts alone, whose blocks remain in the prefix cache."""
    texts = [await asyncio.to_thread(wanted_of_text, family, ids) for ids in TEXTS]
    heard = await asyncio.to_thread(wanted, family, SOUND)
    assert texts != [await asyncio.to_thread(wanted_of_text, family, ids, True) for ids in TEXTS]
    async with running(family.folder, encoder_cache_tokens=512, **settings) as engine:
        alone = [(await answer(engine, text(ids)))[0] for ids in TEXTS]
        assert alone == texts
        for _ in range(2):
            asked = [request(family, SOUND), *map(text, TEXTS), request(family, SOUND)]
            found = await asyncio.gather(*(answer(engine, each) for each in asked))
            assert [tokens for (tokens,) in found] == [heard, *texts, heard]
        return engine.stats


@each_family
async def test_texts_in_a_batch_with_sounds_are_computed_without_the_adapter(family):
    assert (await check(family, max_prefill_chunk=21, num_gpu_blocks_override=family.blocks)).preemptions > 0


@each_family
async def test_rows_of_an_accelerators_graphs_have_their_own_adapters(family, monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda device: HostAccelerator())
    assert (await check(family)).prefix_hits > 0


@each_family
async def test_a_sound_does_not_find_the_blocks_of_a_text(family):
    """Sound and text begin with the same fifty tokens, but the text's keys come from the base matrices alone."""
    heard = request(family, SOUND)
    before = np.array(TEXTS[2][:50], np.int32)
    moved = tuple(
        type(item)(
            item.modality, item.hash, tuple((start + 50, n) for start, n in item.spans), item.num_tokens, item.features
        )
        for item in heard.media
    )
    asked = Request(np.concatenate([before, heard.prompt_token_ids]), heard.sampling, media=moved)
    async with running(family.folder, encoder_cache_tokens=512) as engine:
        (alone,) = await answer(engine, asked)
    async with running(family.folder, encoder_cache_tokens=512) as engine:
        await answer(engine, text(TEXTS[2]))
        (behind,) = await answer(engine, asked)
        assert engine.stats.prefix_hits == 0
        await answer(engine, text(TEXTS[2]))
        assert engine.stats.prefix_hits > 0
    assert behind == alone


@each_family
def test_rows_without_an_adapter_have_the_bits_of_the_matrix(family):
    """Rows with an adapter add PEFT's scaled product; adapters of a joined matrix change their own outputs only."""
    model, stored = load(family.folder), {}
    for shard in open_checkpoint(family.folder):
        stored |= {name: tensor for name, tensor in load_file(shard.path).items() if ".layers.1." in name}
    qkv = model.layers[1].attention.qkv
    rows = torch.randn(5, qkv.in_features)
    model.chosen.begin(None)
    base = qkv(rows)
    model.chosen.begin(torch.tensor([0, 1, 0, 0, 1], dtype=torch.int32) * (1 + model.adapters.index("audio")))
    out = qkv(rows)
    assert torch.equal(out[[0, 2, 3]], base[[0, 2, 3]])
    added = torch.zeros_like(base)
    sizes, first = qkv.out_features, 0
    for size, name in zip(sizes, ("qkv_proj",) if len(sizes) == 1 else ("q_proj", "k_proj", "v_proj")):
        halves = [
            stored.get(n)
            for half in "AB"
            for n in sorted(stored)
            if re.search(rf"{name}\.lora_{half}\.(speech\.)?w", n)
        ]
        if halves:
            added[:, first : first + size] = 2 * rows @ halves[0].T @ halves[1].T
        first += size
    assert torch.allclose((out - base)[[1, 4]], added[[1, 4]], atol=1e-5)
    assert added[[1, 4]].abs().max() > 0.1
    model.chosen.keep(torch.tensor([4]))
    assert torch.allclose(qkv(rows[4:]), out[4:], atol=1e-5)
    residual = torch.randn(1, sum(sizes))
    kept = residual.clone()
    qkv.add_to(residual, rows[4:])
    assert torch.allclose(residual - kept, out[4:], atol=1e-5)


@each_family
def test_adapters_are_counted_as_memory(family):
    folder = family.folder
    shards = open_checkpoint(folder)
    stored = {name: info for shard in shards for name, info in shard.tensors.items()}
    model = build_model(load_model_config(folder), torch.float32, shards=shards)
    read = match(model, shards, str(folder)).keys()
    assert any(".lora_A" in name for name in read)
    whole = sum(stored[name].num_bytes for name in read)
    assert estimate(EngineConfig(model=str(folder)), shards).weight_bytes == weight_bytes(model) == whole


@each_family
def test_a_model_without_media_leaves_its_adapters_out(family):
    config = load_model_config(family.folder, without=("image", "audio", "video"))
    model = build_model(config, torch.float32)
    load_weights(model, str(family.folder))
    assert not model.towers
    assert not model.adapters
    name = "o_proj.base_layer" if family.name == "phi4mm" else "o_proj"
    stored = load_file(family.folder / "model.safetensors")
    (base,) = (tensor for key, tensor in stored.items() if key.endswith(f".layers.1.self_attn.{name}.weight"))
    rows = torch.randn(3, base.shape[1])
    assert torch.allclose(model.layers[1].o(rows), rows @ base.T, atol=1e-5)


@each_family
async def test_quantised_matrices_have_adapters_too(family):
    async with running(family.folder, encoder_cache_tokens=512, quantization="fp8") as engine:
        (heard,) = await answer(engine, request(family, SOUND))
        (read,) = await answer(engine, text(TEXTS[0]))
    assert len(heard) == len(read) == TOKENS
