"""The matrices of a loaded adapter against the weights that PEFT merges, layer by layer, in the model's own order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.base.config import LoraConfig
from engine.layers import moe
from engine.lora.adapter import Adapter, PackedExperts, PackedSite
from engine.lora.load import Rules, load_adapter
from engine.lora.source import Source
from engine.lora.targets import targets_of
from tests import tiny
from tests.models.harness import load
from tests.tiny_adapters import ATTENTION, DENSE, EXPERTS, adapted


@pytest.fixture
def matrices(monkeypatch) -> dict[int, list[Tensor]]:
    """By the id of an ExpertsWeight: the matrices of which it was packed."""
    seen: dict[int, list[Tensor]] = {}
    pack = moe.pack_experts

    def recording(found, *rest: Any, **settings: Any) -> Any:
        weight = pack(found, *rest, **settings)
        seen[id(weight)] = [matrix.float().clone() for matrix in found]
        return weight

    monkeypatch.setattr(moe, "pack_experts", recording)
    return seen


def rules_of(model: Any, folder: Any, **settings: Any) -> Rules:
    targets = targets_of(model)
    return Rules(
        targets, targets.by_path, LoraConfig(**{"max_rank": 64, **settings}), model.dtype, str(folder), 1 << 20
    )


def part_at(model: Any, path: str) -> Any:
    for step in path.split("."):
        model = model[int(step)] if step.isdigit() else getattr(model, step)
    return model


def delta(site: PackedSite | PackedExperts) -> Tensor:
    """B A of all pieces: [rows, in], or [experts, rows, in]."""
    a = site.a.float().unflatten(-2, (len(site.b), -1))
    return torch.cat([b.float() @ a.select(-3, piece) for piece, b in enumerate(site.b)], -2)


def whole(found: list[Tensor], count: int) -> Tensor:
    """[experts, rows, in], from each expert's matrices."""
    each = len(found) // count
    return torch.stack([torch.cat(found[each * expert : each * (expert + 1)]) for expert in range(count)])


def compare(base: Any, merged: Any, adapter: Adapter, matrices: dict[int, list[Tensor]]) -> None:
    """Every target of the model differs from the base by the adapter's product, and other targets do not differ."""
    for path in targets_of(base).by_path:
        before, after = part_at(base, path), part_at(merged, path)
        if isinstance(before, moe.Experts):
            ours, theirs = (whole(matrices[id(each.weight)], before.num_experts) for each in (before, after))
            change = theirs - ours
        else:
            change = after.weight.dense().float() - before.weight.dense().float()
        site = adapter.sites.get(path)
        want = torch.zeros_like(change) if site is None else delta(site)
        assert (change - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max())), path
        assert site is None or want.abs().max() > 1e-3


def check(name: str, tmp_path: Any, matrices: dict[int, list[Tensor]], **settings: Any) -> Adapter:
    """An adapter of PEFT, loaded by us, against the merged checkpoint, loaded by us."""
    peft = adapted(name, tmp_path / "adapter", **settings)
    base = load(tiny.checkpoint(name))
    adapter = load_adapter(Source(str(tmp_path / "adapter")), "x", rules_of(base, tiny.checkpoint(name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    compare(base, load(tmp_path / "merged"), adapter, matrices)
    return adapter


SETTINGS = {
    "rank 3": {"r": 3, "target_modules": ["q_proj", "v_proj"]},
    "rank 12, all": {"r": 12, "target_modules": DENSE},
    "patterns": {
        "r": 4, "target_modules": DENSE, "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp.down_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.k_proj": 3, "down_proj": 40},
    },
    "rslora": {"r": 8, "target_modules": DENSE, "use_rslora": True},
    "one layer": {"r": 2, "target_modules": ["o_proj"], "layers_to_transform": [1]},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_ranks_patterns_and_scales(settings, tmp_path, matrices):
    check("llama", tmp_path, matrices, **settings)


FAMILIES = {
    "qwen2": [*DENSE],
    "gemma2": DENSE,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "starcoder2": [*ATTENTION, "c_fc", "c_proj"],
    "glm4": [*ATTENTION, "gate_up_proj", "down_proj"],
    "cohere": DENSE,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path, matrices):
    check(name, tmp_path, matrices, r=4, target_modules=FAMILIES[name])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "minimax_m2", "llama4"])
def test_parameters_of_all_experts(name, tmp_path, matrices):
    prefix = "feed_forward" if name == "llama4" else "mlp"
    parameters = [each.replace("mlp", prefix) for each in EXPERTS]
    check(name, tmp_path, matrices, r=3, target_modules=ATTENTION, target_parameters=parameters)


def test_parameters_of_all_experts_without_a_gate(tmp_path, matrices):
    parameters = ["mixer.experts.up_proj", "mixer.experts.down_proj"]
    check("nemotron_h", tmp_path, matrices, r=3, target_modules=ATTENTION, target_parameters=parameters)


def test_a_head_of_its_own_and_a_tied_head(tmp_path, matrices):
    for name in ("llama", "qwen2"):
        check(name, tmp_path / name, matrices, r=4, target_modules=["lm_head", "q_proj"])


SEEING = {
    "paligemma": [*ATTENTION, "out_proj", "fc1", "fc2", "linear", "gate_proj"],
    "internvl": [*ATTENTION, "projection_layer", "fc1", "fc2", "linear_1", "linear_2", "down_proj"],
    "llava": ["q_proj", "v_proj", "linear_1", "linear_2"],
    "qwen2_5_vl": r".*(q_proj|attn\.qkv|attn\.proj|gate_proj|up_proj|down_proj|mlp\.0)",
    "qwen3_vl": r".*(q_proj|attn\.qkv|attn\.proj|linear_fc1|linear_fc2)",
}


@pytest.mark.parametrize("name", SEEING)
def test_towers_and_connectors(name, tmp_path, matrices):
    adapter = check(name, tmp_path, matrices, r=3, target_modules=SEEING[name])
    assert adapter.in_towers
    assert any(path.startswith("layers.") for path in adapter.sites)
