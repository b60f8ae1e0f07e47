"""Qwen3.5, 3.6 and 3.8 (text): attention with a gate in every fourth layer, gated delta rules in the others.

Norms are stored as weight - 1; a quarter of each head is rotated. Without images, all axes of M-RoPE are equal. The
loader skips the layers of the module `mtp`, which predict further tokens.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.checkpoint.mixers import LINEAR, layer_kinds, numbers, read_delta, with_mixer, without_kinds
from engine.checkpoint.rope import FULL, RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table

ROPE = RopeDefaults(10_000_000.0, partial=0.25, sections=(11, 11, 10), turns=True)
PREDICTORS = "mtp.*"


BLOCK = "layers.*.linear_attn."
DELTA_ROWS = (
    Row((BLOCK + "conv1d",), "layers.*.state.conv"),
    Row((BLOCK.rstrip("."),), "layers.*.state.numbers"),
    Row((BLOCK + "norm",), "layers.*.state.norm"),
    Row((BLOCK + "out_proj",), "layers.*.state.o", "columns"),
)
APART = Row(tuple(f"{BLOCK}in_proj_{name}" for name in ("qkv", "z", "b", "a")), "layers.*.state.product", "rows")
GROUPED = Row((BLOCK + "in_proj_qkvz", BLOCK + "in_proj_ba"), "layers.*.state.product", "rows")


class Qwen3_5(Llama):
    """Text only; the loader skips the tower of a checkpoint."""

    WEIGHTS = Table((*DECODER_ROWS, *DELTA_ROWS, APART), ignore=(*DECODER_IGNORE, PREDICTORS, "visual.*"))


def read(body: Section, outer: Section, by_key_head: bool = False, rope: RopeDefaults = ROPE) -> TextConfig:
    """The decoder without experts; by_key_head: delta layers are stored as in Qwen3-Next's files."""
    refuse(body, attn_output_gate=True)
    interval, count = body.size("full_attention_interval", 4), body.size("num_hidden_layers")
    kinds = layer_kinds(body, default=[LINEAR if (number + 1) % interval else FULL for number in range(count)])
    width = body.values.get("intermediate_size") or body.values.get("moe_intermediate_size")
    attends = without_kinds(body, count, intermediate_size=width)
    found = read_text(attends, outer, rope=rope, head_dim=256, qk_norm="head", norm_offset=1.0, qkv_layout="gated")
    predictors = body.integer("mtp_num_hidden_layers", 1)
    found = replace(found, num_nextn_predict_layers=predictors)
    if states := numbers(kinds, LINEAR):
        found = with_mixer(found, read_delta(body, by_key_head), states)
    return found


def one_axis(text: TextConfig) -> TextConfig:
    """Replaces M-RoPE by RoPE with one axis: all axes are equal for text."""
    layers = (replace(layer, rope=replace(layer.rope, mrope_section=(), mrope_turns="")) for layer in text.layers)
    return replace(text, layers=tuple(layers))


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder."""
    return one_axis(read(body, outer))


FAMILY = Family(name="Qwen3.5", architectures=("Qwen3_5ForCausalLM",), inside=True, model=Qwen3_5, text=text)
