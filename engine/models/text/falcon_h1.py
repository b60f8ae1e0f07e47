"""Falcon-H1: in every layer attention and Mamba-2 run in parallel on the same input; then a gated MLP.

Thread: device. Nearly every product has a multiplier; loading multiplies the product's weights by it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.mixers import BothConfig
from engine.base.model_config import LayerConfig, TextConfig
from engine.checkpoint.mixers import read_mamba2, with_mixer, without_kinds
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.kernels.state.ssd import SsdShape
from engine.layers.mamba import Mamba2
from engine.layers.mlp import GatedMLP
from engine.layers.rope import Rope
from engine.layers.states import recurrent
from engine.layers.stream import Product, Stream
from engine.models.base.decoder import Caches, DecoderLayer, Metas
from engine.models.base.family import Family
from engine.models.text.bamba import BAMBA_ROWS, norm_row, state_rows
from engine.models.text.llama import DECODER_IGNORE, Llama, LlamaLayer
from engine.quant.gains import Gains
from engine.weights.table import Table

COLUMNS = 5  # parts of Mamba-2's product: z, x, B, C, dt


class FalconH1Layer(LlamaLayer):
    """A layer with two caches: attention's and the state's."""

    is_dealt = True

    def __init__(self, text: TextConfig, layer: LayerConfig, both: BothConfig, state: Mamba2) -> None:
        super().__init__(text, layer)
        assert self.attention is not None
        self.state, inner = state, both.state
        self.attention.qkv.gains = Gains((1.0, both.keys, 1.0), both.attention_in)
        self.output.gains = Gains((both.attention_out,))
        state.product.gains = Gains((columns(state.shape, inner.multipliers),), inner.scale_in)
        state.o.gains, state.o.biases = Gains((inner.scale_out,)), (both.out_bias,)
        assert isinstance(self.mlp, GatedMLP)
        self.mlp.gate_up.gains, self.mlp.down.gains = Gains((both.mlp_gate, 1.0)), Gains((both.mlp_out,))

    def __call__(self, x: Stream, rope: Rope, metas: Metas, caches: Caches, index: Tensor | None) -> None:
        rows, state = x.normed(self.attention_norm), self.state
        assert state is not None
        attended, held = (
            mixer(rows, rope, meta, cache) for mixer, meta, cache in zip(self.mixers, metas, caches, strict=True)
        )
        x.add(Product(self.output, x.keep(index, attended)))
        x.add(Product(state.o, held if index is None else held.index_select(0, index)))
        del attended, held
        x.add(self.fed(x, self.mlp_norm))


def columns(shape: SsdShape, multipliers: tuple[float, ...]) -> Tensor:
    """The multiplier of each column of Mamba-2's product."""
    b = shape.groups * shape.state_size
    widths = (shape.inner, shape.inner, b, b, shape.heads)
    return torch.cat([torch.full((width,), scale) for width, scale in zip(widths, multipliers, strict=True)])


class FalconH1(Llama):
    """Names of weights as in Bamba; each layer has attention and Mamba-2."""

    WEIGHTS = Table((*BAMBA_ROWS, *state_rows(), norm_row()), ignore=DECODER_IGNORE)

    def layer(self, number: int) -> DecoderLayer:
        text, layer = self.config.text, self.config.text.layers[number]
        assert isinstance(layer.mixer, BothConfig)
        state = recurrent(text.hidden_size, layer.mixer.state, self.dtype, self.device)
        assert isinstance(state, Mamba2)
        return FalconH1Layer(text, layer, layer.mixer, state)


def scales(body: Section, key: str, count: int) -> tuple[float, ...]:
    """Reads a list of multipliers; all are 1 if the file has no list."""
    given = body.items(key, (1.0,) * count)
    if len(given) != count or not all(type(scale) in (int, float) for scale in given):
        raise ConfigError(f"{body.path}: {key}={list(given)}; {count} numbers are needed")
    return tuple(map(float, given))


def text(body: Section, outer: Section) -> TextConfig:
    """The configuration of the decoder; a multiplier that the file does not name is 1."""
    count = body.size("num_hidden_layers")
    read = read_text(without_kinds(body, count), outer, eps=1e-5)
    sized = Section({"mamba_d_ssm": 1024, **body.values}, body.path, body.outer)  # null: from mamba_expand, as in Bamba
    first = body.boolean("mamba_norm_before_gate", True)
    norm = ("before gate" if first else "behind gate") if body.boolean("mamba_rms_norm", False) else "none"
    state = read_mamba2(
        sized,
        state_size=256,
        norm=norm,
        scale_in=body.number("ssm_in_multiplier", 1.0),
        scale_out=body.number("ssm_out_multiplier", 1.0),
        multipliers=scales(body, "ssm_multipliers", COLUMNS),
    )
    gate, result = scales(body, "mlp_multipliers", 2)
    both = BothConfig(
        state,
        attention_in=body.number("attention_in_multiplier", 1.0),
        keys=body.number("key_multiplier", 1.0),
        attention_out=body.number("attention_out_multiplier", 1.0),
        out_bias=body.boolean("projectors_bias", False),
        mlp_gate=gate,
        mlp_out=result,
    )
    read = replace(
        read,
        embedding_scale=body.number("embedding_multiplier", 1.0),
        logit_scale=body.number("lm_head_multiplier", 1.0),
    )
    return with_mixer(read, both, range(count))


FAMILY = Family(name="Falcon-H1", architectures=("FalconH1ForCausalLM",), model=FalconH1, text=text)
