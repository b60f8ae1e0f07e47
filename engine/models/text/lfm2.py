"""LFM2: short convolutions in most layers, attention with normed heads in the others, each followed by a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ConfigError
from engine.base.mixers import ConvolutionConfig
from engine.base.model_config import TextConfig
from engine.checkpoint.rope import FULL, RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import ATTENTION, DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table

CONVOLUTION = "conv"
ROPE = RopeDefaults(theta=1_000_000.0)
BLOCK = "layers.*.feed_forward."
NAMES = {
    "layers.*.attention_norm": ("layers.*.operator_norm",),
    "layers.*.attention.q_norm": (ATTENTION + "q_layernorm",),
    "layers.*.attention.k_norm": (ATTENTION + "k_layernorm",),
    "layers.*.o": (ATTENTION + "out_proj",),
    "layers.*.mlp_norm": ("layers.*.ffn_norm",),
    "layers.*.mlp.gate_up": (BLOCK + "w1", BLOCK + "w3"),
    "layers.*.mlp.down": (BLOCK + "w2",),
    "norm": ("embedding_norm",),
}
LFM2_ROWS = (
    *(replace(row, names=NAMES.get(row.target, row.names)) for row in DECODER_ROWS),
    Row(("layers.*.conv.in_proj",), "layers.*.convolution.product", "rows"),
    Row(("layers.*.conv.conv",), "layers.*.convolution.taps"),
    Row(("layers.*.conv.out_proj",), "layers.*.convolution.o", "columns"),
)


class Lfm2(Llama):
    """Llama's layers with other weight names."""

    WEIGHTS = Table(LFM2_ROWS, ignore=DECODER_IGNORE)


def read_layers(body: Section, outer: Section, width: int) -> TextConfig:
    """The config without experts; `width`: the MLP's. `layer_types` names the layers; older files list the layers with
    attention (full_attn_idxs)."""
    count = body.size("num_hidden_layers")
    full = body.items("full_attn_idxs", range(count))
    kinds = body.items("layer_types", [FULL if number in full else CONVOLUTION for number in range(count)])
    if len(kinds) != count or set(kinds) - {FULL, CONVOLUTION}:
        raise ConfigError(f"{body.path}: layer_types={list(kinds)} must be {count} times {FULL!r} or {CONVOLUTION!r}")
    said = {"intermediate_size": width, "layer_types": None, "rms_norm_eps": body.number("norm_eps", 1e-5)}
    tied = body.boolean("tie_embedding", True)
    read = read_text(
        Section({**body.values, **said}, body.path, body.outer), outer, rope=ROPE, tied=tied, qk_norm="head"
    )
    convolution = ConvolutionConfig(read.hidden_size, body.size("conv_L_cache", 3), body.boolean("conv_bias", False))
    layers = tuple(
        layer if kind == FULL else replace(layer, mixer=convolution) for layer, kind in zip(read.layers, kinds)
    )
    return replace(read, layers=layers)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config. Files give the width of an ungated MLP; the gated MLP has two thirds of it, rounded up."""
    width = body.size("block_ff_dim", body.values.get("intermediate_size", 12_288))
    if body.boolean("block_auto_adjust_ff_dim", True):
        step = body.size("block_multiple_of", 256)
        width = int(body.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // step) * step
    return read_layers(body, outer, width)


FAMILY = Family(name="LFM2", architectures=("Lfm2ForCausalLM",), inside=True, model=Lfm2, text=text)
