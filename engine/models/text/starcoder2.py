"""StarCoder2: LayerNorms, biases of every linear layer, and an MLP without a gate."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table

MLP = ("layers.*.mlp.gate_up", "layers.*.mlp.down")


class Starcoder2(Llama):
    """Llama's layers with other weight names."""

    WEIGHTS = Table(
        (
            *(row for row in DECODER_ROWS if row.target not in MLP),
            Row(("layers.*.mlp.c_fc",), "layers.*.mlp.up", "rows"),
            Row(("layers.*.mlp.c_proj",), "layers.*.mlp.down", "columns"),
        ),
        ignore=DECODER_IGNORE,
    )


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    has = body.boolean("use_bias", True)
    return read_text(
        body,
        outer,
        sliding="given",
        tied=True,
        activation="gelu_pytorch_tanh",
        eps=1e-5,
        qkv_bias=has,
        o_bias=has,
        mlp_bias=has,
        gated_mlp=False,
        layer_norm=True,
        norm_bias=True,
    )


FAMILY = Family(
    name="StarCoder2",
    architectures=("Starcoder2ForCausalLM",),
    model=Starcoder2,
    text=text,
    keys={"norm_epsilon": "rms_norm_eps"},
)
