"""Reads Gemma 4's TextConfig from config.json: each layer's heads, shared keys and experts.

transformers 5.23 writes each layer's settings (per_layer_config); released files have settings for all full layers
(global_head_dim, num_global_key_value_heads). Thread: any.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import FULL, SLIDING, RopeDefaults, read_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text, refuse
from engine.models.base.both_ways import USE_BIDIRECTIONAL, attends_both_ways

PER_LAYER = "hidden_size_per_layer_input"
PERIOD = 6  # without layer_types, every PERIOD-th layer has no window
ROPES: dict[str, Any] = {  # default rope_parameters
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    per_layer = 0 if body.values.get(PER_LAYER, 256) is None else body.integer(PER_LAYER, 256)
    if per_layer:
        refuse(body, vocab_size_per_layer_input=body.size("vocab_size"))
    if attends_both_ways(body):
        raise ConfigError(
            f"{body.path}: use_bidirectional_attention={body.values[USE_BIDIRECTIONAL]!r} of Gemma 4 is not supported; "
            "supported are null and 'vision'"
        )
    if not body.values.get("rope_parameters"):
        body = Section({**body.values, "rope_parameters": ROPES}, body.path, body.outer)
    count = body.size("num_hidden_layers")
    kinds = list(body.items("layer_types", [FULL if n % PERIOD == 5 else SLIDING for n in range(count)]))
    kinds[-1:] = [FULL]  # for any value in the file
    body = Section({"sliding_window": 512, **body.values, "layer_types": kinds}, body.path, body.outer)
    ropes = body.section("rope_parameters").values
    as_near = {**body.values, "rope_parameters": ropes.get(SLIDING) or ROPES[SLIDING]}
    read = read_text(
        Section(as_near, body.path, body.outer),
        outer,
        sliding="layers",
        head_dim=256,
        tied=True,
        qk_norm="head",
        activation="gelu_pytorch_tanh",
    )
    layers = tuple(
        replace(layer, **_sizes(body, number, kind), **_sharing(body, kinds, number))
        for number, (layer, kind) in enumerate(zip(read.layers, kinds))
    )
    read = replace(
        read,
        layers=layers,
        embedding_scale=read.hidden_size**0.5,
        logit_softcap=body.number("final_logit_softcapping", 0.0),
        hidden_size_per_layer_input=per_layer,
    )
    read = every_layer(read, scale=1.0, post_norms=True)
    if not body.boolean("enable_moe_block", False):
        return read
    experts = read_experts(
        body, chosen="top_k_experts", norm_topk_prob=True, expert_scale=True, layout="upright", router_norm=True
    )
    return with_experts(read, experts)


def _sizes(body: Section, number: int, kind: str) -> dict[str, Any]:
    """The sizes and the rotation of a layer's heads."""
    if kind == SLIDING:
        return {}
    own = body.section("per_layer_config").values if body.values.get("per_layer_config") else None
    same = body.boolean("attention_k_eq_v", False)
    if own is None:
        heads = body.integer("num_global_key_value_heads", 0) if same else 0
        width = body.size("global_head_dim", 512)
    else:
        each = body.section("per_layer_config")
        given = each.section(str(number)) if own.get(str(number)) else Section({}, each.path)
        heads, width = given.integer("num_key_value_heads", 0), given.size("head_dim", body.size("head_dim", 256))
    if heads and body.size("num_attention_heads") % heads:
        raise ConfigError(
            f"{body.path}: num_attention_heads={body.values['num_attention_heads']} is no multiple of the "
            f"{heads} KV heads of layer {number}"
        )
    rope = read_rope(body, FULL, width, RopeDefaults())
    return {"head_dim": width, "num_kv_heads": heads, "rope": rope, "values_are_keys": same}


def _sharing(body: Section, kinds: list[str], number: int) -> dict[str, Any]:
    """The layer whose keys and values a layer reads, and the width of its MLP."""
    first = len(kinds) - body.integer("num_kv_shared_layers", 0, most=len(kinds))
    if number < first:
        return {}
    before = [place for place in range(first) if kinds[place] == kinds[number]]
    if not before:
        raise ConfigError(
            f"{body.path}: num_kv_shared_layers={len(kinds) - first}: no layer before the layer {first} makes the keys "
            f"that layers of type {kinds[number]!r} read"
        )
    wide = 2 * body.size("intermediate_size") if body.boolean("use_double_wide_mlp", False) else 0
    return {"kv_shared_with": before[-1], "intermediate_size": wide}
