"""A form of weight is one file and one line in the table of dialects: no layer, model or step knows of it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.runtime
from engine.errors import ConfigError
from engine.models.registry import build_model, load_model_config
from engine.quant.dialects import DIALECTS
from engine.weights.load import load_weights, weight_bytes
from engine.weights.table import parts_of
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running
from tests.invariance.test_text import PROMPTS, request
from tests.models import toy_int8


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A checkpoint in toy int8, and the floats that its codes stand for."""
    monkeypatch.setitem(DIALECTS, "toy-int8", toy_int8.dialect)  # the one registration
    source = tiny.checkpoint("qwen2")
    codes, floats = tmp_path / "codes", tmp_path / "floats"
    for folder in (codes, floats):
        shutil.copytree(source, folder)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    packed, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            packed[name], scale = toy_int8.quantised(tensor)
            packed[f"{name}_scale"] = scale
            plain[name] = packed[name] * scale[:, None]
    save_file(packed, codes / file.name)
    save_file(plain, floats / file.name)
    config = json.loads((codes / "config.json").read_text())
    (codes / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "toy-int8"}}))
    return codes, floats


@pytest.mark.parametrize("path", ["host", "device"])
async def test_a_toy_form_of_weight_is_served(folders, path, monkeypatch):
    if path == "device":
        monkeypatch.setattr(engine.runtime, "open_accelerator", lambda _device: HostAccelerator())
    found = []
    for folder in folders:
        async with running(folder, dtype="float32") as served:
            found.append([await answer(served, request(prompt)) for prompt in PROMPTS[:6]])
    assert found[0] == found[1]


def test_a_layer_multiplies_by_the_form_that_its_checkpoint_has(folders):
    model = build_model(load_model_config(folders[0]), torch.float32)
    before = weight_bytes(model)
    load_weights(model, str(folders[0]))
    layer = model.layers[0]
    for linear in (layer.attention.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down):
        assert isinstance(linear.weight, toy_int8.ToyInt8Weight)
    assert not isinstance(model.head.weight, toy_int8.ToyInt8Weight)
    assert before < weight_bytes(build_model(load_model_config(folders[1]), torch.float32))
    x = torch.randn(3, layer.mlp.down.in_features)
    torch.testing.assert_close(layer.mlp.down(x), x @ layer.mlp.down.weight.dense().T)


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_codes_are_drawn_and_read(folders, load_format):
    model = build_model(load_model_config(folders[0]), torch.float32)
    load_weights(model, str(folders[0]), load_format)
    assert model.layers[0].mlp.down.weight.codes.any()


def test_pieces_of_one_product_are_stored_alike(folders, monkeypatch):
    monkeypatch.setitem(DIALECTS, "toy-int8", lambda name, _: None if "k_proj" in name else toy_int8.SCHEME)
    with pytest.raises(ConfigError, match=r"q_proj.*k_proj.*stored in different ways"):
        build_model(load_model_config(folders[0]), torch.float32)


def test_a_checkpoint_of_another_dtype_is_refused_by_name(folders):
    (file,) = folders[0].glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({**tensors, name: tensors[name].float()}, file)
    model = build_model(load_model_config(folders[0]), torch.float32)
    with pytest.raises(ConfigError, match=f"{name} has dtype F32, readable are I8"):
        load_weights(model, str(folders[0]))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_every_matrix_of_a_decoder_says_how_devices_share_it(name):
    model = build_model(load_model_config(tiny.checkpoint(name)), torch.float32)
    shared = {row.target.rsplit(".", 1)[-1]: row.split for row, _, part in parts_of(model.weight_table(), model)}
    assert shared["qkv"] == shared["gate_up"] == shared["head"] == "rows"
    assert shared["o"] == shared["down"] == "columns"
    assert {shared[target] for target in shared.keys() - {"qkv", "gate_up", "head", "o", "down"}} == {None}
