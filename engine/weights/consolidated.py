"""Mistral's own weight files (consolidated*.safetensors), mapped to the names and the row order of transformers.

In: shards with names such as `layers.0.attention.wq.weight`. Out: the same shards with the names of the weight tables.
In these files the rows of a rotary pair are adjacent (rows 2i and 2i + 1 of a head). The kernels expect the first rows
of all pairs, then the second rows, so query and key rows are reordered when they are read:

    file:   a0 b0 a1 b1 a2 b2 ...   ->   a0 a1 a2 ... b0 b1 b2 ...      within each head
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from torch import Tensor

from engine.base.errors import ConfigError
from engine.weights import rows
from engine.weights.table import Shape

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
# Mixtral's names: those of mistral_inference/transformer_layers.py, and with transformers' name of the block.
_EXPERT = re.compile(r"(?:feed_forward|block_sparse_moe)\.(gate|experts\.\d+\.w[123])")
TOWER = "vision_encoder."
SEEING = {  # names of the tower's modules; a layer's modules without the layer's prefix
    "vision_encoder.patch_conv": "vision_tower.patch_conv",
    "vision_encoder.ln_pre": "vision_tower.ln_pre",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
    "attention.wq": "attention.q_proj",
    "attention.wk": "attention.k_proj",
    "attention.wv": "attention.v_proj",
    "attention.wo": "attention.o_proj",
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "feed_forward.gate_proj",
    "feed_forward.w2": "feed_forward.down_proj",
    "feed_forward.w3": "feed_forward.up_proj",
}
_TOWER_LAYER = re.compile(r"vision_encoder\.(transformer\.layers\.\d+\.)")
# Tensors that compressed-tensors writes with or instead of a weight: those with an entry per row, and the others.
BY_ROWS, WHOLE = (
    "weight_packed|weight_scale|weight_zero_point",
    "weight_global_scale|weight_shape|input_(?:global_)?scale",
)
_NAME = re.compile(rf"(layers\.\d+\.)?(.+)\.(weight|bias|qscale_weight|qscale_act|{BY_ROWS}|{WHOLE})")
_ROTATED = re.compile(rf"attention\.w[qk]\.(weight|bias|qscale_weight|{BY_ROWS})$")


def canonical(name: str) -> str:
    """transformers' name of a tensor; an unknown name stays unchanged and is reported as left over."""
    module, _, kind = name.rpartition(".")
    if tower := _TOWER_LAYER.match(name):
        inner = SEEING.get(module[tower.end() :])
        return f"vision_tower.{tower[1]}{inner}.{kind}" if inner else name
    if module in SEEING:
        return f"{SEEING[module]}.{kind}"
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    expert = _EXPERT.fullmatch(found[2])
    layer, known = found[1], f"block_sparse_moe.{expert[1]}" if expert else NAMES.get(found[2])
    if known is None:
        return name
    return f"model.{layer}{known}.{found[3]}" if layer else f"{known}.{found[3]}"


def is_tower(name: str) -> bool:
    """Whether this tensor of the file belongs to the tower."""
    return name.startswith(TOWER)


def is_rotated(name: str) -> bool:
    """Whether the rotary embedding applies to this tensor's rows."""
    return _ROTATED.search(name) is not None


def check_lines(name: str, shapes: Mapping[str, Shape]) -> None:
    """ConfigError if a matrix's rows are reordered, but its scales or zero points have no entry per row."""
    module, _, kind = name.rpartition(".")
    codes = next((shapes[each] for end in ("weight", "weight_packed") if (each := f"{module}.{end}") in shapes), ())
    lines = shapes[name]
    if kind in ("weight_scale", "weight_zero_point") and prod(lines) != 1 and lines[:1] != codes[:1]:
        raise ConfigError(
            f"{name} has shape {list(lines)}, and the rows of {list(codes)} change places at load; a scale or a zero "
            "point for each row, or one scale, is read: use the checkpoint in Hugging Face's names"
        )


def half_split(tensor: Tensor, head_dim: int) -> Tensor:
    """A copy with each head's even rows before its odd rows; a scalar scale is returned unchanged."""
    if tensor.numel() == 1:
        return tensor
    if len(tensor) % head_dim or head_dim % 2:
        raise ConfigError(
            f"{len(tensor)} rows of a query or key weight are no heads of head_dim={head_dim} in params.json"
        )
    return rows.half_split(tensor, head_dim, head_dim)
