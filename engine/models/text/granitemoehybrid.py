"""Granite 4 (H and dense): Mamba-2 in most layers or in none, attention in the others, experts and a shared MLP.

Multipliers are as in Granite; heads are rotated only if position_embedding_type is "rope".
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.mixers import LINEAR, layer_kinds, numbers, read_mamba2, with_mixer, without_kinds
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer
from engine.models.base.family import Family
from engine.models.text import granite
from engine.models.text.bamba import norm_row, state_rows
from engine.models.text.granite_moe import GraniteMoE
from engine.models.text.llama import DECODER_IGNORE
from engine.weights.table import Row, Table

SHARED = "layers.*.shared_mlp."
DENSE = ("layers.*.mlp.gate_up", "layers.*.mlp.down")


class GraniteMoEHybrid(GraniteMoE):
    """`shared_mlp` of a file is the shared expert in layers with experts, and the MLP in the others."""

    WEIGHTS = Table(
        (
            *(row for row in GraniteMoE.WEIGHTS.rows if row.target not in DENSE),
            *state_rows(),
            norm_row(),
            Row((SHARED + "input_linear",), "layers.*.mlp.gate_up", "rows"),
            Row((SHARED + "output_linear",), "layers.*.mlp.down", "columns"),
            Row((SHARED + "input_linear",), "layers.*.experts.shared.gate_up", "rows"),
            Row((SHARED + "output_linear",), "layers.*.experts.shared.down", "columns"),
        ),
        ignore=DECODER_IGNORE,
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder."""
    count, width = body.size("num_hidden_layers"), body.size("shared_intermediate_size", 1024)
    kinds = layer_kinds(body, default=[LINEAR] * count)
    named = body.values.get("position_embedding_type")
    if named not in (None, "nope", "rope"):
        raise ConfigError(f"{body.path}: position_embedding_type={named!r}; supported are rope and nope")
    read = granite.text(without_kinds(body, count, intermediate_size=width), outer)
    read = replace(read, joined_mlp=True)
    if named != "rope":
        read = every_layer(read, rope=no_rope(read.head_dim))
    if states := numbers(kinds, LINEAR):
        read = with_mixer(read, read_mamba2(body, state_size=256), states)
    if body.integer("num_local_experts", 8):
        experts = read_experts(
            body, width="intermediate_size", norm_topk_prob=True, layout="joined", shared_width=width
        )
        read = with_experts(read, experts)
    return read


FAMILY = Family(name="Granite 4", architectures=("GraniteMoeHybridForCausalLM",), model=GraniteMoEHybrid, text=text)
