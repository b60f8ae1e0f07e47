"""DeBERTa-v2 and v3 (Prompt-Guard, mxbai-rerank-v1, NLI): BERT with relative distances instead of positions.

A score is the sum of three dot products: query and key, query and a distance's key, key and a distance's query. Each
layer computes the keys and queries of distances from a table that all layers share (kernels/attention/disentangled).
In the xlarge models a convolution reads the embeddings in parallel with the first layer; its result is added to the
layer's result, and a norm follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, ModelConfig, TextConfig
from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, refuse
from engine.kernels.activation import BY_NAME
from engine.kernels.attention.disentangled import disentangled_attention
from engine.layers.distance import log_buckets
from engine.layers.embed import Positions
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.layers.rope import Rope
from engine.models.base.encoder import Encoder, EncoderLayer
from engine.models.base.family import Family
from engine.models.pooling.bert import ROWS, post_norm_text
from engine.models.pooling.classes import ALL, classes
from engine.pooling.heads import ACTIVATIONS
from engine.weights.table import Row, Table

SELF = "encoder.layer.*.attention.self."
OWN = (
    Row((SELF + "query_proj", SELF + "key_proj", SELF + "value_proj"), "layers.*.qkv", "rows"),
    Row(("encoder.rel_embeddings",), "away.rows"),
    Row(("encoder.LayerNorm",), "away.norm"),
    Row(("encoder.conv.conv",), "layers.*.conv"),
    Row(("encoder.conv.LayerNorm",), "layers.*.conv_norm"),
)
OF_CONVOLUTIONS = ("tanh", "gelu", "relu")  # activations
IGNORED = (
    "embeddings.position_*", "pooler.dense.*", "cls.*", "lm_predictions.*", "mask_predictions.*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """How a checkpoint maps distances to the rows of a table [2 * size], whose middle row is distance 0."""

    size: int
    bucketed: bool
    longest: int  # longest distance with its own bucket

    @staticmethod
    def of(body: Section) -> Span:
        longest = body.integer("max_relative_positions", -1, least=-1)
        longest = body.size("max_position_embeddings") if longest < 1 else longest
        buckets = body.integer("position_buckets", -1, least=-1)
        return Span(buckets, True, longest) if buckets > 0 else Span(longest, False, longest)


class Away:
    """The table of distances, and the row of each distance."""

    def __init__(self, text: TextConfig, span: Span, reach: int, device: str, norm: bool = True) -> None:
        """`reach`: the longest distance between two tokens of an input."""
        self.rows = Positions(2 * span.size, text.hidden_size)
        self.norm = LayerNorm(text.hidden_size, text.norm_eps) if norm else None
        away = torch.arange(-reach, reach + 1)
        away = log_buckets(away, span.size, span.longest) if span.bucketed else away
        self.buckets = (away + span.size).clamp(0, 2 * span.size - 1).int().to(device)

    def normed(self) -> Tensor:
        """The normalised table, [2 * size, hidden] float32."""
        norm, table = self.norm, self.rows.table.float()
        if norm is None:
            return table
        bias = None if norm.bias is None else norm.bias.float()
        return functional.layer_norm(table, table.shape[1:], norm.weight.float(), bias, norm.eps)


class DebertaLayer(EncoderLayer):
    """BERT's layer with two additional terms in a score."""

    is_dealt = True

    def __init__(self, text: TextConfig, away: Away) -> None:
        super().__init__(text)
        self._away = away
        self._of_distances: tuple[Tensor, Tensor] | None = None  # keys and queries, made at the first step

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, bounds: Tensor, bias: Tensor | None) -> Tensor:
        if self._of_distances is None:
            keys_of, queries_of = self.of_distances(self._away.normed())
            shape = -1, self.heads, self.head_dim
            self._of_distances = keys_of.to(queries.dtype).view(shape), queries_of.to(queries.dtype).view(shape)
        return disentangled_attention(
            queries, keys, values, *self._of_distances, self._away.buckets, bounds, self.scale
        )

    def of_distances(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and the queries of all distances, float32 [n, hidden] each; table: float32 [n, hidden].

        Uses torch only, because the first call may be in a step that must not launch our kernels (kernels/precompile).
        """
        weight, bias = self.qkv.weight.dense().float(), self.qkv.weight.dense_bias()
        made = functional.linear(table, weight, None if bias is None else bias.float())
        queries, keys, _ = made.chunk(3, 1)
        return keys.contiguous(), queries.contiguous()


class ConvolvedLayer(DebertaLayer):
    """A layer, optionally with a parallel convolution: y = norm(layer(x) + f(convolution(x))). Each rank computes the
    whole convolution."""

    is_dealt = True

    def __init__(self, text: TextConfig, away: Away, size: int, activation: str) -> None:
        """`size`: kernel size of the convolution in tokens, centred; 0: no convolution."""
        super().__init__(text, away)
        self.conv = self.conv_norm = None
        self.size = size
        if size:
            self.conv = Linear(size * text.hidden_size, text.hidden_size, bias=True, fold=(text.hidden_size, size))
            self.conv_norm = LayerNorm(text.hidden_size, text.norm_eps)
            self.conv_activation = ACTIVATIONS[activation]

    def __call__(
        self, x: Tensor, bounds: Tensor, index: Tensor | None, rope: Rope | None, bias: Tensor | None
    ) -> Tensor:
        if self.conv is None or self.conv_norm is None:
            return super().__call__(x, bounds, index, rope, bias)
        beside = self.conv_activation(self.conv(neighbours(x, bounds, self.size)))
        made = super().__call__(x, bounds, index, rope, bias)
        return self.conv_norm(beside if index is None else beside.index_select(0, index), residual=made)


def neighbours(x: Tensor, bounds: Tensor, size: int) -> Tensor:
    """x [T, hidden] -> [T, hidden * size]: each value of a token and of its neighbours; zeros beyond the input."""
    token = torch.arange(len(x), device=x.device)
    own = torch.searchsorted(bounds[1:].contiguous(), token.to(bounds.dtype), right=True)
    found = []
    for away in range(-(size // 2), size // 2 + 1):
        at = (token + away).clamp(0, len(x) - 1)
        there = (own.index_select(0, at) == own) & (at == token + away)
        found.append(x.index_select(0, at) * there[:, None])
    return torch.stack(found, 2).flatten(1)


class DebertaV2(Encoder):
    """The encoder; most checkpoints have neither positions nor token types."""

    WEIGHTS = Table((*(row for row in ROWS if row.target != "layers.*.qkv"), *OWN), ("deberta.",), IGNORED)
    reads_pairs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        body = Section(config.raw, "config.json")
        longest = config.max_model_len or config.max_position
        self.away = Away(config.text, Span.of(body), longest - 1, device)
        first = 0 if body.boolean("position_biased_input", True) else None
        super().__init__(config, dtype, device, body.integer("type_vocab_size", 0), first)

    def made_layers(self, text: TextConfig) -> list[EncoderLayer]:
        body = Section(self.config.raw, "config.json")
        size, named = body.integer("conv_kernel_size", 0), str(body.values.get("conv_act") or "tanh")
        return [ConvolvedLayer(text, self.away, 0 if number else size, named) for number in range(len(text.layers))]


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(body, share_att_key=True, relative_attention=True, norm_rel_ebd="layer_norm", conv_groups=1)
    size, named = body.integer("conv_kernel_size", 0), str(body.values.get("conv_act") or "tanh")
    if size and size % 2 == 0:
        raise ConfigError(f"{body.path}: conv_kernel_size={size}; odd ones are supported, with a middle")
    if size and named not in OF_CONVOLUTIONS:
        raise ConfigError(f"{body.path}: conv_act={named!r}; supported are {', '.join(OF_CONVOLUTIONS)}")
    for key in ("share_att_key", "relative_attention", "norm_rel_ebd"):
        if body.values.get(key) is None:
            raise ConfigError(f"{body.path}: {key} is missing; supported are files that have it, as those of v3 do")
    return both_ways(body, qkv_bias=True)


def both_ways(body: Section, **family: Any) -> TextConfig:
    """The config of an encoder whose scores have both distance terms; family: fields of TextConfig."""
    kinds = body.values.get("pos_att_type") or ()
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if {str(kind).strip().lower() for kind in kinds} != {"c2p", "p2c"}:
        raise ConfigError(f"{body.path}: pos_att_type={body.values.get('pos_att_type')!r}; supported is c2p|p2c")
    read = post_norm_text(
        Section({"layer_norm_eps": 1e-7, **body.values}, body.path, body.outer),
        None,
        gated_mlp=False,
        o_bias=True,
        mlp_bias=True,
        **family,
    )
    for key, wanted in (("embedding_size", read.hidden_size), ("attention_head_size", read.head_dim)):
        refuse(body, **{key: wanted})
    return every_layer(read, scale=(3 * read.head_dim) ** -0.5)  # a score is the sum of three products


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """The heads of DebertaV2ForSequenceClassification and DebertaV2ForTokenClassification."""
    hidden = body.size("hidden_size")
    last = HeadLayer("classifier", hidden, len(labels_of(body)), bias=True)
    if form != "score":
        return (last,) if form == "tokens" else ()
    refuse(body, pooler_hidden_size=hidden)
    activation = str(body.values.get("pooler_hidden_act") or "gelu")
    if activation not in ACTIVATIONS or activation not in BY_NAME:
        raise ConfigError(f"{body.path}: pooler_hidden_act={activation!r} is not supported; supported is gelu")
    return HeadLayer("pooler.dense", hidden, hidden, bias=True, activation=activation), last


FAMILY = Family(name="DeBERTa-v2, v3", architectures=classes("DebertaV2", *ALL), model=DebertaV2, text=text, head=head)
