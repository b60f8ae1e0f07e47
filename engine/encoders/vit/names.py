"""Checkpoint names of the parts of each kind of plain vision transformer; rows for a model's WEIGHTS. Frozen.

Names are canonical: `vision_tower.` and `vision_model.` are stripped (PREFIXES).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.encoders.vit.config import VitConfig
from engine.weights.table import Row, Table

# Prefixes of the tower's and the decoder's tensors, from transformers 5, released files and remote code.
PREFIXES = ("model.", "language_model.", "text_model.", "model.", "vision_tower.", "vision_model.")


@dataclass(frozen=True, slots=True)
class VitNames:
    """Names of the tower's modules; a layer's modules are relative to the layer."""

    patch: str
    positions: str  # the module, or the object that holds the tensor
    position_kind: str  # the tensor's own name
    class_kind: str
    batch: int  # leading dimensions of size 1 in the class token and in the positions
    pre_norm: str
    layer: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    post_norm: str
    qk_norms: tuple[str, str] = ("", "")
    scales: tuple[str, str] = ("lambda_1", "lambda_2")  # a layer's scales of the outputs of attention and MLP
    unread: tuple[str, ...] = ()


CLIP = VitNames(
    patch="embeddings.patch_embedding",
    positions="embeddings.position_embedding",
    position_kind="weight",
    class_kind="class_embedding",
    batch=0,
    pre_norm="pre_layrnorm",  # as released
    layer="encoder.layers.*.",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
    post_norm="post_layernorm",
    unread=("head.*", "embeddings.position_ids"),
)
INTERNVL = VitNames(
    patch="embeddings.patch_embeddings.projection",
    positions="embeddings",
    position_kind="position_embeddings",
    class_kind="cls_token",
    batch=2,
    pre_norm="",
    layer="encoder.layer.*.",
    norms=("layernorm_before", "layernorm_after"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    up=("mlp.fc1",),
    down="mlp.fc2",
    post_norm="layernorm",
    qk_norms=("attention.q_norm", "attention.k_norm"),
    unread=("embeddings.mask_token",),
)
INTERN_VIT = VitNames(
    patch="embeddings.patch_embedding",
    positions="embeddings",
    position_kind="position_embedding",
    class_kind="class_embedding",
    batch=2,
    pre_norm="",
    layer="encoder.layers.*.",
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    out="attn.proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
    post_norm="",
    qk_norms=("attn.q_norm", "attn.k_norm"),
    scales=("ls1", "ls2"),
)
PIXTRAL = VitNames(
    patch="patch_conv",
    positions="",
    position_kind="",
    class_kind="",
    batch=0,
    pre_norm="ln_pre",
    layer="transformer.layers.*.",
    norms=("attention_norm", "ffn_norm"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    post_norm="",
)
NAMES = {
    "clip_vision_model": CLIP,
    "siglip_vision_model": CLIP,
    "siglip2_vision_model": CLIP,
    "internvl_vision": INTERNVL,
    "intern_vit_6b": INTERN_VIT,
    "pixtral": PIXTRAL,
    "idefics3": CLIP,
    "minicpmv": CLIP,
}

_LAST_PRODUCT = {1: "connector.modality_projection.proj", 2: "multi_modal_projector.linear_2"}
_PROJECTOR_NORM = {"rms": "norm", "layer": "layer_norm"}


def with_tower(table: Table, config: VitConfig) -> Table:
    """A decoder's WEIGHTS, and the rows of its tower at the attribute `vision`."""
    names = NAMES[config.kind]
    layer, target = names.layer, "vision.layers.*."
    rows = (
        Row((names.patch,), "vision.patch_embed"),
        Row(("embeddings",), "vision.class_token"),
        Row((names.positions,), "vision.positions"),
        Row((names.pre_norm,), "vision.pre_norm"),
        Row((layer + names.norms[0],), target + "norm1"),
        Row(tuple(layer + name for name in names.qkv), target + "qkv"),
        Row((layer + names.qk_norms[0],), target + "q_norm"),
        Row((layer + names.qk_norms[1],), target + "k_norm"),
        Row((layer + names.out,), target + "out"),
        Row((layer[:-1],), target + "out_scale"),
        Row((layer + names.norms[1],), target + "norm2"),
        Row(tuple(layer + name for name in names.up), target + "up"),
        Row((layer + names.down,), target + "down"),
        Row((layer[:-1],), target + "down_scale"),
        Row((names.post_norm,), "vision.post_norm"),
        Row(
            (
                config.projector.norm_name
                or f"multi_modal_projector.{'norm' if config.projector.norm == 'rms' else 'layer_norm'}",
            ),
            "vision.projector.norm",
        ),
        Row(("multi_modal_projector.patch_merger.merging_layer",), "vision.projector.reduce"),
        Row((config.projector.inner_name or "multi_modal_projector.linear_1",), "vision.projector.inner"),
        Row((config.projector.outer_name or _LAST_PRODUCT[config.projector.products],), "vision.projector.outer"),
        Row(("",), "vision.newline"),
    )
    behind = range(config.num_layers, config.num_layers + config.left_out)
    ignore = [f"{layer.replace('*', str(number))}*" for number in behind]
    if not config.post_norm and names.post_norm:
        ignore.append(f"{names.post_norm}.*")
    return Table((*table.rows, *rows), PREFIXES, (*table.ignore, *names.unread, *ignore))
