"""GPT-2: learned positions instead of rotation, LayerNorms, biases everywhere, matrices stored transposed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.weight import Weight
from engine.layers.batch import Batch
from engine.layers.embed import Positions
from engine.layers.mlp import PlainMLP
from engine.models.base.decoder import DecoderLayer
from engine.models.base.family import Family
from engine.models.text.llama import Llama, LlamaLayer
from engine.quant.base import UNQUANTISED, Arrange, Expected, Tensors
from engine.weights.table import Row, Shape, Table, Wanted

BIASED: dict[str, Any] = {
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "gated_mlp": False,
    "layer_norm": True,
    "norm_bias": True,
}


class Transposed:
    """The scheme of matrices stored as [in_features, out_features], under "weight"."""

    turned = True  # which axis of a file's matrix holds what: ranks cut by it

    def expects(self, out_features: Shape, fold: Shape) -> Expected:
        return {"weight": tuple(Wanted((*fold, rows)) for rows in out_features)}

    def weight(
        self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool, arrange: Arrange | None
    ) -> Weight:
        upright: Tensors = {"weight": [piece.t().contiguous() for piece in tensors["weight"] if piece is not None]}
        return UNQUANTISED.weight(upright, bias, placement, gated, arrange)


class LearnedPositions(Llama):
    """A decoder that adds learned positions to the embeddings; OFFSET: unused rows at the start of the table."""

    OFFSET = 0
    takes_rows = False  # a row that replaces an embedding would lack the position

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        self.positions = Positions(config.max_position, config.text.hidden_size, self.OFFSET)

    def embedded(self, batch: Batch) -> Tensor:
        return super().embedded(batch).add_(self.positions(batch.positions))


class GPT2(LearnedPositions):
    """Llama's layers with other weight names."""

    WEIGHTS = Table(
        (
            Row(("wte",), "embed"),
            Row(("wpe",), "positions"),
            Row(("h.*.ln_1",), "layers.*.attention_norm"),
            Row(("h.*.attn.c_attn",), "layers.*.attention.qkv", "rows"),
            Row(("h.*.attn.c_proj",), "layers.*.o", "columns"),
            Row(("h.*.ln_2",), "layers.*.mlp_norm"),
            Row(("h.*.mlp.c_fc",), "layers.*.mlp.up", "rows"),
            Row(("h.*.mlp.c_proj",), "layers.*.mlp.down", "columns"),
            Row(("ln_f",), "norm"),
            Row(("lm_head",), "head", "rows"),
        ),
        prefixes=("transformer.",),
        ignore=("h.*.attn.bias", "h.*.attn.masked_bias"),
    )

    def layer(self, number: int) -> DecoderLayer:
        layer = LlamaLayer(self.config.text, self.config.text.layers[number])
        assert isinstance(layer.mlp, PlainMLP)
        assert layer.attention is not None
        assert layer.o is not None
        for linear in (layer.attention.qkv, layer.o, layer.mlp.up, layer.mlp.down):
            linear.scheme = Transposed()
        return layer


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    refuse(body, add_cross_attention=False)
    width = body.size("n_inner", 4 * body.size("hidden_size"))
    read = read_text(
        Section({**body.values, "intermediate_size": width}, body.path),
        outer,
        tied=True,
        activation="gelu_new",
        eps=1e-5,
        **BIASED,
        qkv_layout="joined",
    )
    scale = read.layers[0].scale if body.boolean("scale_attn_weights", True) else 1.0
    each = body.boolean("scale_attn_by_inverse_layer_idx", False)
    scales = [scale / (number + 1 if each else 1) for number in range(len(read.layers))]
    rope = no_rope(read.head_dim)
    return replace(
        read, layers=tuple(replace(layer, rope=rope, scale=scale) for layer, scale in zip(read.layers, scales))
    )


KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
FAMILY = Family(name="GPT-2", architectures=("GPT2LMHeadModel",), model=GPT2, text=text, keys=KEYS)
