"""Bamba: Mamba-2 in most layers; attention with half of each head rotated in the others; a gated MLP in each."""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.mixers import LINEAR, layer_kinds, numbers, read_mamba2, with_mixer, without_kinds
from engine.checkpoint.rope import FULL, RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table

BLOCK = "layers.*.feed_forward."
NAMES = {
    "layers.*.mlp_norm": ("layers.*.pre_ff_layernorm",),
    "layers.*.mlp.gate_up": (BLOCK + "gate_proj", BLOCK + "up_proj"),
    "layers.*.mlp.down": (BLOCK + "down_proj",),
    "norm": ("final_layernorm",),
}
BAMBA_ROWS = tuple(replace(row, names=NAMES.get(row.target, row.names)) for row in DECODER_ROWS)


def state_rows(block: str = "layers.*.mamba.") -> tuple[Row, ...]:
    """Rows of weights that Mamba and Mamba-2 share; `block`: the prefix of all names."""
    return (
        Row((block + "in_proj",), "layers.*.state.product", "rows"),
        Row((block + "conv1d",), "layers.*.state.conv"),
        Row((block.rstrip("."),), "layers.*.state.numbers"),
        Row((block + "out_proj",), "layers.*.state.o", "columns"),
    )


def norm_row(block: str = "layers.*.mamba.") -> Row:
    """The row of Mamba-2's gated norm."""
    return Row((block + "norm",), "layers.*.state.norm")


ROPE = RopeDefaults(partial=0.5)


class Bamba(Llama):
    """Llama's layers, with other names of weights."""

    WEIGHTS = Table((*BAMBA_ROWS, *state_rows(), norm_row()), ignore=DECODER_IGNORE)


def kinds_by_index(body: Section) -> list[str]:
    """Kinds of layers by attn_layer_indices, which lists the layers with attention."""
    count, full = body.size("num_hidden_layers"), body.items("attn_layer_indices", ())
    return layer_kinds(body, default=[FULL if number in full else LINEAR for number in range(count)])


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder."""
    kinds = kinds_by_index(body)
    read = read_text(without_kinds(body, len(kinds)), outer, rope=ROPE, eps=1e-5)
    if states := numbers(kinds, LINEAR):
        read = with_mixer(read, read_mamba2(body, state_size=256), states)
    return read


FAMILY = Family(name="Bamba", architectures=("BambaForCausalLM",), model=Bamba, text=text)
