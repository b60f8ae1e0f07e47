"""Writes checkpoints with quantised experts: a module for each matrix, MXFP4, or all experts' codes in one tensor."""

from __future__ import annotations

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.quant import oracle
from tests.quant.written import VARIANTS

SIZES = {"hidden_size": 192, "num_hidden_layers": 2, "mlp_only_layers": [0], "intermediate_size": 320}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 320, "norm_topk_prob": True}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
LYING = {
    "llama4": tiny.causal(
        "Llama4ForCausalLM", "Llama4TextConfig", head_dim=20, hidden_size=192, intermediate_size=64,
        intermediate_size_mlp=100, num_local_experts=5, num_hidden_layers=2, interleave_moe_layer_step=1,
        attention_chunk_size=11,
    ),
    "gemma4": tiny.causal(
        "Gemma4ForCausalLM", "Gemma4TextConfig", head_dim=12, global_head_dim=24, num_hidden_layers=2, hidden_size=96,
        attention_k_eq_v=True, num_key_value_heads=3, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        sliding_window=8, tie_word_embeddings=True, layer_types=["sliding_attention", "full_attention"],
        enable_moe_block=True, num_experts=5, top_k_experts=3, moe_intermediate_size=64,
    ),
}  # fmt: skip


def rewritten(source, folder, tensors, **changes):
    """Writes the checkpoint `source` with other tensors and a changed configuration."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def sparse_folder(root):
    """A float checkpoint of Qwen3-MoE with one dense layer and one layer of experts."""
    made = tiny.causal("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=32, **SIZES, **EXPERTS)()
    return tiny.save(made, root / "floats")


def gpt_oss_folders(root):
    """gpt-oss in MXFP4, and its dequantised floats, transposed as in transformers' layout."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2}
    made = tiny.causal("GptOssForCausalLM", "GptOssConfig", head_dim=16, num_hidden_layers=2, **sizes)()
    source = tiny.save(made, root / "source")
    coded, floats = {}, {}
    draw = torch.Generator().manual_seed(1)
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            coded[name] = floats[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=draw).to(torch.uint8)
        scales = torch.randint(121, 126, (experts, rows, columns // 32), generator=draw).to(torch.uint8)
        scales[0, 0, 0] = 0
        coded[f"{name}_blocks"], coded[f"{name}_scales"] = blocks, scales
        pairs = np.stack([E2M1[blocks.numpy() & 15], E2M1[blocks.numpy() >> 4]], axis=-1)
        values = pairs.reshape(experts, rows, columns // 32, 32) * 2.0 ** (scales.numpy()[..., None] - 127.0)
        floats[name] = torch.from_numpy(values.reshape(experts, rows, columns)).float().transpose(1, 2)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return (
        rewritten(source, root / "codes", coded, quantization_config=settings),
        rewritten(source, root / "floats", floats),
    )


def in_codes(sparse, folder, name):
    """The checkpoint `sparse` with every product in the codes of a dialect."""
    variant, draw = VARIANTS[name], torch.Generator().manual_seed(2)
    tensors = {}
    for key, tensor in load_file(sparse / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        if module.endswith("_proj") and kind == "weight":
            tensors |= {f"{module}.{kind}": each for kind, each in variant.write(draw, *tensor.shape).items()}
        else:
            tensors[key] = tensor
    return rewritten(sparse, folder, tensors, quantization_config=variant.settings)


def in_one(name, form, root, source=None):
    """Checkpoints with all experts of a layer in one tensor, as codes and as the floats that they stand for."""
    if source is None:
        source = tiny.save(LYING[name](), root / "source") if name in LYING else tiny.checkpoint(name)
    variant, draw = VARIANTS[form], torch.Generator().manual_seed(3)
    tensors, wanted, upright = {}, {}, name == "gemma4"
    for key, tensor in load_file(source / "model.safetensors").items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = wanted[key] = tensor
            continue
        count, rows, columns = tensor.shape if upright else tensor.transpose(1, 2).shape
        made = [variant.write(draw, rows, columns) for _ in range(count)]
        each = made if upright else [{**expert, **numbers_of(made[0])} for expert in made]
        wide = torch.from_numpy(np.stack([oracle.matrix(variant.settings, expert) for expert in each])).float()
        wanted[key] = wide if upright else wide.transpose(1, 2)
        for kind in each[0].keys() - {"weight_shape"}:
            short = kind.removeprefix("weight_") if upright or form.startswith("fp8") else kind
            called = key if kind == "weight" else f"{key}_{short}"
            if each[0][kind].numel() == 1:
                tensors[called] = each[0][kind]
            else:
                tensors[called] = torch.stack([expert[kind] if upright else expert[kind].T for expert in each])
    coded = rewritten(source, root / "codes", tensors, quantization_config=variant.settings)
    return coded, rewritten(source, root / "floats", wanted)


def numbers_of(expert):
    return {kind: tensor for kind, tensor in expert.items() if tensor.numel() == 1}
