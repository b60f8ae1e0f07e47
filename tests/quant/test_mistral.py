"""Mistral's own FP8: consolidated files, a scale per matrix or row, and permuted rows of queries and keys."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.weights import consolidated
from engine.weights.consolidated import NAMES
from tests.models.harness import Harness, load
from tests.quant.written import FP8, VARIANTS, Variant, floats8, write

TOKENS = [5, 9, 200, 17, 33, 250, 61]
HEAD_DIM = 32


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """The rows with each head's two halves interleaved."""
    codes = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    heads = codes.unflatten(0, (-1, 2, HEAD_DIM // 2))
    return heads.transpose(1, 2).flatten(0, 2).contiguous().view(rows.dtype)


WRITERS = {
    "matrix": VARIANTS["fp8 qscale_weight"],
    "row": Variant(FP8, floats8("qscale_weight", "flat", static="qscale_act")),
}
COMPRESSED = (
    "ct float channel",
    "ct float static",
    "ct int8 weights",
    "ct w4 32",
    "ct w4 asymmetric bytes",
    "ct nvfp4",
)
WRITERS |= {name: VARIANTS[name] for name in COMPRESSED}


def written(root, per):
    """A checkpoint with transformers' names, and the same with Mistral's names."""
    source, folder = write(root / "source", WRITERS[per]), root / "consolidated"
    folder.mkdir()
    theirs = {ours.removeprefix("model."): name for name, ours in NAMES.items()}
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, kind = name.removeprefix("model.").rpartition(".")
        layer, _, inner = module.partition("layers.")[2].partition(".")
        place = f"layers.{layer}.{theirs[inner]}" if layer else theirs[module]
        rotated = module.endswith(("q_proj", "k_proj")) and (kind == "weight" or tensor.numel() > 1)
        rotated = rotated and kind != "weight_shape"
        tensors[f"{place}.{kind}"] = interleaved(tensor) if rotated else tensor
    tensors["layers.0.attention.k_fake_quantizer.qscale_act"] = torch.tensor(1.0)
    save_file(tensors, folder / "consolidated.safetensors")
    config = json.loads((source / "config.json").read_text())
    params = {
        "dim": config["hidden_size"], "n_layers": 2, "head_dim": HEAD_DIM, "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": 2, "norm_eps": 1e-6, "vocab_size": config["vocab_size"],
        "rope_theta": 10_000.0, "max_position_embeddings": 512,
        "quantization": {**WRITERS[per].settings, "quant_method": "compressed_tensors"} if per in COMPRESSED
                        else {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    return source, folder


def logits(folder):
    harness = Harness(load(folder, "float32"))
    return harness.prefill(harness.add(TOKENS))


@pytest.mark.parametrize("per", WRITERS)
def test_consolidated_fp8_gives_the_logits_of_the_same_weights_in_the_other_names(tmp_path, per):
    source, folder = written(tmp_path, per)
    assert torch.equal(logits(source), logits(folder))


def test_rows_that_move_without_their_scales_are_found(tmp_path, monkeypatch):
    source, folder = written(tmp_path, "row")
    monkeypatch.setattr(consolidated, "_ROTATED", re.compile(r"attention\.w[qk]\.weight$"))
    assert not torch.allclose(logits(source), logits(folder), rtol=1e-3)


@pytest.mark.parametrize("name", ["ct float block", "ct w4 asymmetric"])
def test_lines_of_several_rows_do_not_change_places(tmp_path, name, monkeypatch):
    monkeypatch.setitem(WRITERS, name, VARIANTS[name])
    kind = "weight_scale" if name == "ct float block" else "weight_zero_point"
    monkeypatch.setattr("tests.quant.test_mistral.interleaved", lambda rows: rows)
    _, folder = written(tmp_path, name)
    with pytest.raises(ConfigError, match=rf"layers\.0\.attention\.w[qk]\.{kind} has shape .*: use the checkpoint in"):
        load(folder)
