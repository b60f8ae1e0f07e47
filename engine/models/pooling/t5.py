"""T5's encoder (sentence-t5, gtr-t5, instructor): a pre-norm body with a bias of scores by the key's distance.

Norms are RMSNorms, linear layers have no bias, and scores are not scaled. The distance biases work as MPNet's; the
checkpoint has them in the first layer. T5 1.1 has a gated MLP.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, LayerConfig, ModelConfig, TextConfig
from engine.checkpoint.pooling import Form
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.checkpoint.text import refuse
from engine.kernels.activation import pointwise
from engine.layers.distance import BUCKETS, REACH, Buckets
from engine.layers.linear import GatedLinear
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope
from engine.models.base.encoder import Encoder, EncoderLayer
from engine.models.base.family import Family
from engine.weights.table import Row, Table

LAYER = "encoder.block.*.layer."
SELF = LAYER + "0.SelfAttention."
MLP = LAYER + "1.DenseReluDense."
GATE = Row((MLP + "wi_0", MLP + "wi_1"), "layers.*.up", "rows")
ROWS = (
    Row(("shared",), "embed"),
    Row(("encoder.block.0.layer.0.SelfAttention.relative_attention_bias",), "distances"),
    Row((LAYER + "0.layer_norm",), "layers.*.attention_norm"),
    Row((SELF + "q", SELF + "k", SELF + "v"), "layers.*.qkv", "rows"),
    Row((SELF + "o",), "layers.*.o", "columns"),
    Row((LAYER + "1.layer_norm",), "layers.*.mlp_norm"),
    Row((MLP + "wi",), "layers.*.up", "rows"),
    Row((MLP + "wo",), "layers.*.down", "columns"),
    Row(("encoder.final_layer_norm",), "norm"),
)
IGNORED = ("encoder.embed_tokens.*", "decoder.*", "lm_head.*")
KEYS = {
    "d_model": "hidden_size", "d_ff": "intermediate_size", "d_kv": "head_dim", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "layer_norm_epsilon": "rms_norm_eps", "n_positions": "max_position_embeddings",
}  # fmt: skip
ACTIVATIONS = {"relu": ("relu", False), "gated-gelu": ("gelu_new", True)}  # feed_forward_proj -> (activation, gated)


class T5Layer(EncoderLayer):
    """A norm before attention, and one before the MLP."""

    is_dealt = True

    def __init__(self, text: TextConfig) -> None:
        super().__init__(text)
        self.attention_norm = RMSNorm(text.hidden_size, text.norm_eps)  # type: ignore[assignment]
        self.mlp_norm = RMSNorm(text.hidden_size, text.norm_eps)  # type: ignore[assignment]

    def __call__(
        self, x: Tensor, bounds: Tensor, index: Tensor | None, rope: Rope | None, bias: Tensor | None
    ) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).view(len(x), 3 * self.heads, self.head_dim)
        queries, keys, values = heads.split(self.heads, 1)
        attended = self.attend(queries, keys, values, bounds, bias)
        if index is not None:
            x, attended = x.index_select(0, index), attended.index_select(0, index)
        self.add_to(self.o, x, attended)
        inner = self.up(self.mlp_norm(x))
        self.add_to(self.down, x, inner if isinstance(self.up, GatedLinear) else pointwise(inner, self.activation))
        return x


class T5(Encoder):
    """An encoder with a norm after the last layer, and none after the embeddings."""

    WEIGHTS = Table(ROWS, prefixes=(), ignore=IGNORED)

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device, types=0, first_position=None)
        self.embed_norm = None
        self.norm = RMSNorm(config.text.hidden_size, config.text.norm_eps)
        self.distances = Buckets(config.text.num_heads)

    def layer(self, text: TextConfig) -> EncoderLayer:
        return T5Layer(text)

    def weight_table(self) -> Table:
        table = super().weight_table()
        if not self.config.text.gated_mlp:
            return table
        return replace(table, rows=tuple(GATE if row.target == GATE.target else row for row in table.rows))


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(body, relative_attention_num_buckets=BUCKETS, relative_attention_max_distance=REACH)
    given = str(body.values.get("feed_forward_proj") or "relu")
    if given not in ACTIVATIONS:
        raise ConfigError(
            f"{body.path}: feed_forward_proj={given!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    activation, gated = ACTIVATIONS[given]
    heads, width = body.size("num_attention_heads", 8), body.size("head_dim", 64)
    return TextConfig(
        vocab_size=body.size("vocab_size"),
        hidden_size=body.size("hidden_size"),
        intermediate_size=body.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width,
        norm_eps=body.number("rms_norm_eps", 1e-6),
        qkv_bias=False,
        o_bias=False,
        qk_norm="none",
        mlp_bias=False,
        tie_embeddings=False,
        layers=(LayerConfig(0, no_rope(width), 1.0),) * body.integer("num_hidden_layers", least=1, most=MAX_LAYERS),
        activation=activation,
        gated_mlp=gated,
    )


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """No heads: T5's classifiers are not supported."""
    return ()


FAMILY = Family(
    name="T5 (encoder)", architectures=("T5EncoderModel", "MT5EncoderModel"), model=T5, text=text, head=head, keys=KEYS
)
