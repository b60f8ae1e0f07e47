"""A new form of weight needs files of engine/quant and engine/kernels/gemm; no layer, model or step names it."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.run.start
from engine.base.errors import ConfigError
from engine.kernels.gemm.group_panels import GroupPanels
from engine.kernels.gemm.parts import PartsWeight
from engine.models.registry import build_model, load_model_config
from engine.quant.dialects import DIALECTS
from engine.weights.load import load_weights, weight_bytes
from engine.weights.table import parts_of
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.invariance.test_text import PROMPTS, request
from tests.models.harness import load
from tests.quant import oracle
from tests.quant.written import VARIANTS, Variant, write

ROOT = Path(__file__).parents[2]
FORMAT_NAMES = re.compile(
    r"\b(gptq|awq|nvfp4|mxfp4|mxfp8|fp8|modelopt|compressed|e4m3|e2m1|int4|int8)\b", re.IGNORECASE
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of 4-bit quantised weights, and a checkpoint of the same weights dequantised."""
    root, variant = tmp_path_factory.mktemp("forms"), VARIANTS["ct w4 mixed"]
    codes = write(root / "codes", variant)
    floats = write(root / "floats", Variant({}, variant.write, variant.sizes))
    tensors = {name: torch.from_numpy(value).float().contiguous() for name, value in oracle.dequantised(codes).items()}
    save_file(tensors, floats / "model.safetensors")
    return codes, floats


@pytest.mark.parametrize("path", ["host", "device"])
async def test_quantised_weights_are_served(folders, path, monkeypatch):
    if path == "device":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    found = []
    for folder in folders:
        async with running(folder, dtype="float32") as served:
            found.append([await answer(served, request(prompt)) for prompt in PROMPTS[:6]])
    assert found[0] == found[1]


async def test_tokens_do_not_depend_on_company_chunks_or_the_cache(folders):
    async with running(folders[0], dtype="float32", enable_prefix_caching=False) as served:
        alone = [await answer(served, request(prompt)) for prompt in PROMPTS[:8]]
    for settings in ({}, {"max_prefill_chunk": 7}, {"num_gpu_blocks_override": 24, "max_model_len": 160}):
        async with running(folders[0], dtype="float32", **settings) as served:
            together = await asyncio.gather(*[answer(served, request(prompt)) for prompt in PROMPTS[:8]])
            again = [await answer(served, request(prompt)) for prompt in PROMPTS[:2]]
        assert (list(together), again) == (alone, alone[:2]), settings


def test_a_layer_multiplies_by_the_form_that_its_checkpoint_has(folders):
    model = load(folders[0])
    layer = model.layers[0]
    assert isinstance(layer.attention.qkv.weight, PartsWeight)  # v_proj is not quantised
    for linear in (layer.o, layer.mlp.down):
        assert isinstance(linear.weight, GroupPanels)
    assert not isinstance(model.head.weight, GroupPanels)
    assert layer.o.weight.num_bytes < 192 * 192  # less than a byte per weight
    x = torch.randn(3, layer.mlp.down.in_features)
    torch.testing.assert_close(layer.mlp.down(x), x @ layer.mlp.down.weight.dense().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["ct w4 32", "ct w8 asymmetric", "ct int8", "ct nvfp4", "fp8 blocks", "gptq act", "awq 32", "modelopt fp8"]
)
def test_random_codes_need_no_files(name, tmp_path):
    (tmp_path / "config.json").write_bytes((write(tmp_path / "whole", VARIANTS[name]) / "config.json").read_bytes())
    model = build_model(load_model_config(tmp_path), torch.float32)
    load_weights(model, str(tmp_path), "dummy")
    for linear in (model.layers[0].attention.qkv, model.layers[1].mlp.down):
        assert isinstance(linear.weight, GroupPanels)
        assert linear.weight.dense().isfinite().all()
        assert linear.weight.dense().any()
    assert (
        weight_bytes(model) < weight_bytes(build_model(load_model_config(tiny.checkpoint("llama")), torch.float32)) * 9
    )


def test_a_checkpoint_of_another_dtype_is_refused_by_name(folders, tmp_path):
    folder = write(tmp_path, VARIANTS["ct w4 32"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_packed"
    save_file({**tensors, name: tensors[name].float()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} has dtype F32, readable are I32"):
        load(folder)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_every_matrix_of_a_decoder_says_how_devices_share_it(name):
    model = build_model(load_model_config(tiny.checkpoint(name)), torch.float32)
    shared = {row.target.rsplit(".", 1)[-1]: row.split for row, _, part in parts_of(model.weight_table(), model)}
    assert shared["qkv"] == shared["gate_up"] == shared["head"] == "rows"
    assert shared["o"] == shared["down"] == "columns"
    assert {shared[target] for target in shared.keys() - {"qkv", "gate_up", "head", "o", "down"}} == {None}


def test_models_layers_and_steps_name_no_format():
    for room in ("models", "layers", "step"):
        for path in (ROOT / "engine" / room).rglob("*.py"):
            assert not FORMAT_NAMES.search(path.read_text()), path


def test_a_dialect_fits_a_screen_or_two():
    for module in {sys.modules[dialect.__module__] for dialect in DIALECTS.values()}:
        assert len(inspect.getsource(module).splitlines()) <= 125, module
