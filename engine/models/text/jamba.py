"""Jamba: Mamba in most layers, attention without rotation in the others; experts replace every second MLP."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.mixers import LINEAR, layer_kinds, numbers, read_mamba1, with_mixer, without_kinds
from engine.checkpoint.rope import FULL, no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.models.base.family import Family
from engine.models.text.bamba import BAMBA_ROWS, BLOCK, state_rows
from engine.models.text.llama import DECODER_IGNORE, Llama
from engine.models.text.sparse import as_stored
from engine.weights.table import Row, Table

MOE_ROWS = (
    Row((BLOCK + "router",), "layers.*.experts.router"),
    Row((BLOCK + "experts",), "layers.*.experts.gate_up", "rows"),
    Row((BLOCK + "experts",), "layers.*.experts.down", "columns"),
)


MAMBA = "layers.*.mamba."
MAMBA_ROWS = (
    *state_rows(),
    Row((MAMBA + "x_proj",), "layers.*.state.mixed", "columns"),
    Row((MAMBA + "dt_proj",), "layers.*.state.steps", "rows"),
    *(
        Row((f"{MAMBA}{name}_layernorm",), f"layers.*.state.norms.{number}")
        for number, name in enumerate(("dt", "b", "c"))
    ),
)


class Jamba(Llama):
    """Names of weights as in Bamba, and experts."""

    WEIGHTS = Table((*BAMBA_ROWS, *MAMBA_ROWS, *MOE_ROWS), ignore=DECODER_IGNORE)

    def weight_table(self) -> Table:
        return as_stored(super().weight_table(), self.config.text)


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder; a softmax over all experts gives the weights, without renormalising."""
    count, period, offset = body.size("num_hidden_layers"), body.size("attn_layer_period", 8), "attn_layer_offset"
    default = [FULL if number % period == body.integer(offset, 4) else LINEAR for number in range(count)]
    kinds = layer_kinds(body, default=default)
    read = read_text(without_kinds(body, count), outer)
    read = every_layer(read, rope=no_rope(read.head_dim))
    if states := numbers(kinds, LINEAR):
        norms = read_mamba1(body, "mamba_", norms="weights", eps=read.norm_eps)
        read = with_mixer(read, norms, states)
    if body.size("num_experts", 16) > 1:
        step, first = body.size("expert_layer_period", 2), body.integer("expert_layer_offset", 1)
        experts = read_experts(body, width="intermediate_size", layout="upright")
        read = with_experts(read, experts, {number for number in range(count) if number % step == first})
    return read


FAMILY = Family(name="Jamba", architectures=("JambaForCausalLM",), model=Jamba, text=text)
