"""Models that cannot have adapters by name are refused at start, and --lora-target-modules narrows the layers."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from engine.base.config import LoraConfig
from engine.base.errors import ConfigError
from engine.layers.placed_device import DeviceRows, DeviceSite
from engine.lora.config import CONFIG
from engine.lora.sites import changed, give_host_sites
from engine.models.registry import build_model, load_model_config
from engine.weights.files import ADAPTER
from engine.weights.gguf import GGUF
from tests import pooling_kit, tiny
from tests.engine.host_accelerator import HostBranch
from tests.kernels.adapters import SHAPES, filled, numbers_of


def test_a_gguf_file_is_refused(tmp_path):
    (tmp_path / GGUF).touch()
    config = replace(load_model_config(tiny.checkpoint("qwen3")), folder=str(tmp_path))
    with pytest.raises(ConfigError, match="GGUF"):
        give_host_sites(build_model(config, torch.float32), LoraConfig())


def test_a_pooled_decoder_has_no_head_to_change():
    folder = pooling_kit.embedder("qwen3")
    sites = give_host_sites(build_model(load_model_config(folder), torch.float32), LoraConfig())
    assert "layers.0.attention.qkv" in sites
    assert "head" not in sites


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("q_proj",), {"attention.qkv"}),
        (("o_proj", "up_proj"), {"o", "experts.gate_up", "experts.down"}),
        (("gate_up_proj",), {"experts.gate_up", "experts.down"}),
    ],
)
def test_targets_name_modules_of_the_checkpoint(targets, found):
    """Experts have both products, or none."""
    model = build_model(load_model_config(tiny.checkpoint("qwen3_moe")), torch.float32)
    paths = [path for path, _ in changed(model, LoraConfig(targets=targets))]
    assert {path.split(".", 2)[2] for path in paths if path.startswith("layers.0.")} == found


@pytest.mark.parametrize(("rows", "branches"), [(3, 0), (20, 1), (100, 0)])
def test_only_few_rows_use_the_branch(rows, branches):
    branch, own = HostBranch(), DeviceRows(5, invariant=False)
    site = DeviceSite(SHAPES[0], own)
    site.place_in(filled(torch.float32), branch)
    own.begin(numbers_of(rows, "drawn"))
    x, y = torch.randn(rows, SHAPES[0].in_features), torch.zeros(rows, SHAPES[0].width)
    low = site.lowered(x)
    assert (branch.count, branch.open) == (branches, branches > 0)
    site.add_to(y, x, low)
    assert not branch.open
    assert y.any()


def saved(folder, modules, rank=2, **config):
    """A file with an adapter of these modules, name -> (rows, in)."""
    tensors = {}
    for name, (rows, columns) in modules.items():
        tensors[f"base_model.model.model.{name}.lora_A.weight"] = torch.ones(rank, columns)
        tensors[f"base_model.model.model.{name}.lora_B.weight"] = torch.ones(rows, rank)
    folder.mkdir()
    save_file(tensors, folder / ADAPTER)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, **config}))
    return str(folder)


def test_only_layers_that_named_adapters_change_have_places(tmp_path):
    model = build_model(load_model_config(tiny.checkpoint("qwen3_moe")), torch.float32)
    parts = dict(changed(model, LoraConfig()))
    width, hidden = parts["layers.0.experts.gate_up"].pieces[0], parts["layers.0.o"].out_features[0]
    first = saved(tmp_path / "a", {"layers.1.self_attn.o_proj": (hidden, parts["layers.0.o"].in_features)})
    other = saved(tmp_path / "b", {"layers.0.mlp.experts.3.up_proj": (width, hidden)})
    found = {path for path, _ in changed(model, LoraConfig(named=(("a", first), ("b", other))))}
    assert found == {"layers.1.o", "layers.0.experts.gate_up", "layers.0.experts.down"}
    elsewhere = LoraConfig(named=(("a", first), ("b", "org/name")))
    assert {path for path, _ in changed(model, elsewhere)} == parts.keys()
