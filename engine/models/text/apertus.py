"""Apertus: norms of heads, and xIELU with learned slopes in an MLP without a gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.kernels.gemm.pack import Placement
from engine.kernels.xielu import xielu
from engine.layers.mlp import PlainMLP
from engine.models.base.decoder import DecoderLayer
from engine.models.base.family import Family
from engine.models.text.arcee import PLAIN_MLP_ROWS
from engine.models.text.llama import DECODER_IGNORE, Llama, LlamaLayer
from engine.weights.table import Row, Table, Wanted

NORMS = {
    "layers.*.attention_norm": "layers.*.attention_layernorm",
    "layers.*.mlp_norm": "layers.*.feedforward_layernorm",
}
RELEASED = {  # default rope_parameters
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class Slopes:
    """The xIELU activation of one layer, with learned slopes."""

    __slots__ = ("slopes",)

    slopes: Tensor  # [4] float32, as engine/kernels/xielu takes them

    def __call__(self, x: Tensor) -> Tensor:
        return xielu(x, self.slopes)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        one, number = (Wanted((1,)),), (Wanted(()),)
        return {"alpha_p": one, "alpha_n": one, "beta": number, "eps": number}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        found = [pieces[kind][0] for kind in ("alpha_p", "alpha_n", "beta", "eps")]
        alpha_p, alpha_n, beta, eps = (piece.float().reshape(()) for piece in found if piece is not None)
        learned = functional.softplus(alpha_p), beta + functional.softplus(alpha_n)
        self.slopes = torch.stack([*learned, beta, eps]).to(placement.device)


class Apertus(Llama):
    """Llama's layers with an xIELU MLP."""

    WEIGHTS = Table(
        (
            *(Row((NORMS[row.target],), row.target) if row.target in NORMS else row for row in PLAIN_MLP_ROWS),
            Row(("layers.*.mlp.act_fn",), "layers.*.mlp.activate"),
        ),
        ignore=DECODER_IGNORE,
    )

    def layer(self, number: int) -> DecoderLayer:
        text = self.config.text
        mlp = PlainMLP(text.hidden_size, text.intermediate_size, text.mlp_bias, Slopes())
        return LlamaLayer(text, text.layers[number], mlp)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    if not body.values.get("rope_parameters") and not body.values.get("rope_scaling"):
        body = Section({**body.values, "rope_parameters": RELEASED}, body.path)
    rope = RopeDefaults(12_000_000.0)
    read = read_text(body, outer, rope=rope, activation="xielu", eps=1e-5, qk_norm="head", gated_mlp=False)
    if read.activation != "xielu":
        raise ConfigError(
            f"{body.path}: hidden_act={read.activation!r} of Apertus is not supported; supported is 'xielu'"
        )
    return read


FAMILY = Family(name="Apertus", architectures=("ApertusForCausalLM",), model=Apertus, text=text)
