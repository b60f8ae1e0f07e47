"""Llama 4 (text): rotating layers attend within a chunk, other layers to everything; weights scale experts' inputs.

Rotated queries and keys are normalised without weights; unrotated queries are scaled by their position. A token has
one expert and the shared MLP. Thread: device.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ExpertsConfig, RopeConfig, TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults, no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.layers.norm import RMSNorm
from engine.models.base.decoder import DecoderLayer
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama, LlamaLayer
from engine.models.text.sparse import as_stored
from engine.weights.table import Row, Table, Wanted

CHUNKED, FULL = "chunked_attention", "full_attention"
BLOCK = "layers.*.feed_forward."
SHARED = BLOCK + "shared_expert."
DENSE = {
    "layers.*.mlp.gate_up": (BLOCK + "gate_proj", BLOCK + "up_proj"),
    "layers.*.mlp.down": (BLOCK + "down_proj",),
}


class UnitNorm(RMSNorm):
    """x / rms(x), without weights in the checkpoint."""

    __slots__ = ()

    def __init__(self, size: int, eps: float, device: str) -> None:
        super().__init__(size, eps)
        self.weight = torch.ones(size, device=device)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {}


class Llama4(Llama):
    """The decoder."""

    WEIGHTS = Table(
        (
            *(replace(row, names=DENSE.get(row.target, row.names)) for row in DECODER_ROWS),
            Row((BLOCK + "router",), "layers.*.experts.router"),
            Row((BLOCK + "experts",), "layers.*.experts.gate_up", "rows"),
            Row((BLOCK + "experts",), "layers.*.experts.down", "columns"),
            Row((SHARED + "gate_proj", SHARED + "up_proj"), "layers.*.experts.shared.gate_up", "rows"),
            Row((SHARED + "down_proj",), "layers.*.experts.shared.down", "columns"),
        ),
        ignore=DECODER_IGNORE,
    )

    def weight_table(self) -> Table:
        return as_stored(super().weight_table(), self.config.text)

    def layer(self, number: int) -> DecoderLayer:
        text = self.config.text
        made = LlamaLayer(text, text.layers[number])
        attention = made.attention
        if attention is not None and text.layers[number].unit_norms:
            attention.qk_norm = "head after rotation"
            attention.q_norm = attention.k_norm = UnitNorm(text.head_dim, text.norm_eps, self.device)
        return made


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    plain = {key: value for key, value in body.values.items() if key != "layer_types"}
    plain["intermediate_size"] = body.size("intermediate_size_mlp", 16_384)  # width in layers without experts
    rope = RopeDefaults(500_000.0, interleaved=True)
    read = read_text(Section(plain, body.path, body.outer), outer, head_dim=128, rope=rope, eps=1e-5)
    count, period = len(read.layers), body.size("no_rope_layer_interval", 4)
    rotated = body.items("no_rope_layers", ()) or [int((number + 1) % period != 0) for number in range(count)]
    kinds = body.items("layer_types", ()) or [CHUNKED if turns else FULL for turns in rotated]
    if len(rotated) < count or len(kinds) != count or set(kinds) - {CHUNKED, FULL}:
        raise ConfigError(
            f"{body.path}: no_rope_layers has {len(rotated)} entries and layer_types {len(kinds)} for {count} layers; "
            f"one for each is needed, layer_types of {CHUNKED!r} and {FULL!r}"
        )
    chunk = 0 if body.values.get("attention_chunk_size", 1) is None else body.size("attention_chunk_size", 8192)
    norms, still = body.boolean("use_qk_norm", True), _still(body, read.head_dim)
    layers = tuple(
        replace(
            layer,
            window=chunk if kind == CHUNKED else 0,
            chunked=kind == CHUNKED and chunk > 0,
            rope=layer.rope if turns else still,
            unit_norms=norms and bool(turns),
        )
        for layer, turns, kind in zip(read.layers, rotated, kinds)
    )
    return with_experts(replace(read, layers=layers), _experts(body), _sparse(body, count))


def _still(body: Section, head_dim: int) -> RopeConfig:
    """The RopeConfig of layers without rotation; released files say attn_temperature_tuning=4 and mean true."""
    none = no_rope(head_dim)
    if not body.values.get("attn_temperature_tuning", True):
        return none
    step, growth = int(body.number("floor_scale", 8192)), body.number("attn_scale", 0.1)
    if step < 1:
        raise ConfigError(f"{body.path}: floor_scale={step} must be at least 1")
    return replace(none, query_scaling=growth, query_offset=1, original_max_position=step)


def _experts(body: Section) -> ExpertsConfig:
    width = body.size("intermediate_size", 8192)
    return read_experts(
        body, width="intermediate_size", score="sigmoid", weigh_input=True, layout="turned", shared_width=width
    )


def _sparse(body: Section, count: int) -> set[int]:
    """The layers with experts."""
    step = body.size("interleave_moe_layer_step", 1)
    found = set(body.items("moe_layers", range(step - 1, count, step)))
    if found - set(range(count)):
        raise ConfigError(f"{body.path}: moe_layers={sorted(found)}: layers are numbered 0 to {count - 1}")
    return found


FAMILY = Family(name="Llama 4", architectures=("Llama4ForCausalLM",), inside=True, model=Llama4, text=text)
