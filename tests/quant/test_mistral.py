"""Mistral's own FP8: consolidated files, a scale per matrix, query and key rows that change places."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from engine.weights.consolidated import NAMES
from tests.models.harness import Harness, load
from tests.quant.written import VARIANTS, write

TOKENS = [5, 9, 200, 17, 33, 250, 61]
HEAD_DIM = 32


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Each head's halves, row by row in turn."""
    heads = rows.view(torch.uint8).unflatten(0, (-1, 2, HEAD_DIM // 2))
    return heads.transpose(1, 2).flatten(0, 2).contiguous().view(rows.dtype)


def test_consolidated_fp8_gives_the_logits_of_the_same_weights_in_the_other_names(tmp_path):
    source = write(tmp_path / "source", VARIANTS["fp8 qscale_weight"])
    folder = tmp_path / "consolidated"
    folder.mkdir()
    theirs = {ours.removeprefix("model."): name for name, ours in NAMES.items()}
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, kind = name.removeprefix("model.").rpartition(".")
        layer, _, inner = module.partition("layers.")[2].partition(".")
        place = f"layers.{layer}.{theirs[inner]}" if layer else theirs[module]
        rotated = kind == "weight" and module.endswith(("q_proj", "k_proj"))
        tensors[f"{place}.{kind}"] = interleaved(tensor) if rotated else tensor
    tensors["layers.0.attention.k_fake_quantizer.qscale_act"] = torch.tensor(1.0)
    save_file(tensors, folder / "consolidated.safetensors")
    config = json.loads((source / "config.json").read_text())
    params = {
        "dim": config["hidden_size"], "n_layers": 2, "head_dim": HEAD_DIM, "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": 2, "norm_eps": 1e-6, "vocab_size": config["vocab_size"],
        "rope_theta": 10_000.0, "max_position_embeddings": 512,
        "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    both = []
    for each in (source, folder):
        harness = Harness(load(each, "float32"))
        both.append(harness.prefill(harness.add(TOKENS)))
    assert torch.equal(*both)
