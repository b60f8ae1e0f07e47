"""Encoder: a bidirectional post-norm body; the base of BERT, RoBERTa and others.

Thread: device. Inputs are concatenated without padding; one step computes an input completely, and nothing is
cached. Norms follow attention and MLP:

    x = norm(word + position + type); without the position if queries and keys are rotated
    each layer: x = norm(x + o(attention(x))); x = norm(x + down(activate(up(x)))), or down(activate(gate(x)) * up(x))

Scores may have a bias by the distance of a key (layers/distance). In the last layer only the tokens that the pooler
reads continue after attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from engine.base.dealing import Section, share
from engine.base.dealing import width as dealt_width
from engine.base.model_config import ModelConfig, TextConfig
from engine.base.request import Modality
from engine.cache.spec import CacheSpec
from engine.cache.tokens import NothingSpec
from engine.encoders.tower import Tower
from engine.kernels.activation import BY_NAME, pointwise
from engine.kernels.attention.dense import dense_attention
from engine.kernels.rotate import apply_rope
from engine.layers.batch import Batch
from engine.layers.distance import Buckets, Slopes
from engine.layers.embed import Embedding, Positions
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.layers.rope import Rope, RopeTable
from engine.layers.stream import Exchange
from engine.models.base.model import Model
from engine.pooling.heads import Pooler
from engine.weights.table import Table


class EncoderLayer:
    """Attention, then MLP, each followed by a norm."""

    is_dealt: ClassVar[bool] = True  # in the class's own body, as DecoderLayer's
    exchange: Exchange | None = None  # the layer has a slice of the products `o` and `down`, as one of several

    def __init__(self, text: TextConfig) -> None:
        width = text.num_heads * text.head_dim
        self.heads, self.head_dim, self.scale = text.num_heads, text.head_dim, text.layers[0].scale
        self.activation = BY_NAME[text.activation]
        parts = (width, width, width) if text.qkv_layout == "apart" else (3 * width,)
        self.qkv = Linear(text.hidden_size, *parts, bias=text.qkv_bias)
        self.o = Linear(width, text.hidden_size, bias=text.o_bias)
        self.attention_norm = LayerNorm(text.hidden_size, text.norm_eps)
        if text.gated_mlp:
            self.up: Linear = GatedLinear(
                text.hidden_size, text.intermediate_size, False, self.activation, text.joined_mlp
            )
        else:
            self.up = Linear(text.hidden_size, text.intermediate_size, bias=text.mlp_bias)
            self.up.rows = ((dealt_width(text.intermediate_size),),)
        self.down = Linear(text.intermediate_size, text.hidden_size, bias=text.mlp_bias)
        heads = Section(text.num_heads, text.head_dim)
        self.qkv.rows = ((heads,),) * 3 if text.qkv_layout == "apart" else ((heads,) * 3,)
        self.o.columns, self.down.columns = (heads,), (dealt_width(text.intermediate_size),)
        self.mlp_norm = LayerNorm(text.hidden_size, text.norm_eps)

    def __call__(
        self, x: Tensor, bounds: Tensor, index: Tensor | None, rope: Rope | None, bias: Tensor | None
    ) -> Tensor:
        """Overwrites x [T, hidden]; with `index` the result has only these tokens."""
        heads = self.qkv(x).view(len(x), 3 * self.heads, self.head_dim)
        queries, keys, values = self.normed(*heads.split(self.heads, 1))
        if rope is not None:
            queries, keys = apply_rope(heads[:, : 2 * self.heads], rope.cos, rope.sin).split(self.heads, 1)
        attended = self.attend(queries, keys, values, bounds, bias)
        if index is not None:
            x, attended = self.keep(index, x, attended)
        return self.after_mlp(self.after_attention(x, attended))

    def keep(self, index: Tensor, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Selects the tokens of `index`, int64 [S], with which the layer continues."""
        return x.index_select(0, index), attended.index_select(0, index)

    def normed(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalises queries, keys and values, [T, heads, head_dim] each, before the rotation; here: unchanged."""
        return queries, keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, bounds: Tensor, bias: Tensor | None) -> Tensor:
        """[T, heads, head_dim] each, rotated -> [T, heads * head_dim]; an input's tokens lie between two `bounds`."""
        return dense_attention(queries, keys, values, bounds, self.scale, mixed_lengths=True, bias=bias)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [T, hidden], which is overwritten, attended [T, heads * head_dim] -> the MLP's input."""
        return self.normed_sum(self.o, self.attention_norm, x, attended)

    def after_mlp(self, x: Tensor) -> Tensor:
        """x [T, hidden], which is overwritten -> the layer's result."""
        inner = self.up(x)
        inner = inner if isinstance(self.up, GatedLinear) else pointwise(inner, self.activation)
        return self.normed_sum(self.down, self.mlp_norm, x, inner)

    def normed_sum(self, product: Linear, norm: LayerNorm, x: Tensor, rows: Tensor) -> Tensor:
        """norm(x + product(rows)), where a product's result is the sum over all ranks; overwrites x [T, hidden]."""
        if self.exchange is None:
            return product.normed_sum(norm, x, rows)
        self.add_to(product, x, rows)
        return norm(x)

    def add_to(self, product: Linear, x: Tensor, rows: Tensor) -> None:
        """x += product(rows), summed over all ranks."""
        if self.exchange is None:
            product.add_to(x, rows)
        else:
            self.exchange.add_to(x, product(rows))


class Encoder(Model):
    """A text encoder; `types`: number of token types, the second of which marks a pair's second text; 0: no types.

    `first_position`: the row of the position table for an input's first token; None: no table, heads are rotated if
    the layers say so. `narrow`: width of an embedding, widened by a linear layer after the norm; None: the hidden size.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: str,
        types: int,
        first_position: int | None,
        narrow: int | None = None,
    ) -> None:
        text = config.text
        width = narrow or text.hidden_size
        assert config.pooling is not None, "an encoder makes vectors or scores"
        self.config, self.dtype, self.device = config, dtype, device
        self.towers: dict[Modality, Tower] = {}
        self.embed = Embedding(text.vocab_size, width, None)
        self.positions = self._ropes = None
        if first_position is None and text.layers[0].rope.kind != "none":
            self._ropes = RopeTable(text.layers[0].rope, device, config.max_model_len or config.max_position)
        elif first_position is not None:
            self.positions = Positions(config.max_position, width, first_position)
        self.types = Positions(types, width) if types else None
        self.embed_norm: LayerNorm | None = LayerNorm(width, text.norm_eps)
        self.norm: RMSNorm | None = None  # after the last layer
        self.widen = None if width == text.hidden_size else Linear(width, text.hidden_size, bias=True)
        self.distances: Buckets | Slopes | None = None
        self.layers = self.made_layers(text)
        self.pooler = Pooler(config.pooling, self.embed, text.vocab_size, tied=False)
        self._run = self.layers  # the layers that forward runs

    def made_layers(self, text: TextConfig) -> list[EncoderLayer]:
        """Makes all layers, in the order in which they run."""
        return [self.layer(text) for _ in text.layers]

    def layer(self, text: TextConfig) -> EncoderLayer:
        """Makes one layer."""
        return EncoderLayer(text)

    def weight_table(self) -> Table:
        """WEIGHTS without the parts that this checkpoint lacks."""
        assert self.pooler is not None
        rows = [row for row in self.WEIGHTS.rows if getattr(self, row.target.partition(".")[0]) is not None]
        return self.pooler.table(replace(self.WEIGHTS, rows=tuple(rows)))

    @property
    def exchange(self) -> Exchange | None:
        """As Decoder's."""
        return self.layers[0].exchange

    @exchange.setter
    def exchange(self, link: Exchange) -> None:
        for layer in self.layers:
            layer.exchange = link

    def deal(self, whole: Encoder, rank: int, ranks: int) -> None:
        """Takes over what a rank's part of the `whole` encoder cannot compute from its own number of heads."""
        if isinstance(whole.distances, Slopes):
            heads = share(Section(whole.config.text.num_heads), rank, ranks)
            self.distances = whole.distances.of_heads(*heads, self.device)

    def cache_specs(self) -> list[CacheSpec]:
        return [NothingSpec()]

    def caches_of(self, number: int) -> Sequence[int]:
        return (0,)

    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        starts = batch.attention[0].query_start  # [num_rows + 1] int32
        bounds = batch.attention[0].covering(len(batch.token_ids)).query_start
        rope = None if self._ropes is None else self._ropes(batch.positions)
        bias = None if self.distances is None else self.distances.bias
        x = self._embedded(batch, starts)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.widen is not None:
            x = self.widen(x)
        for left, layer in zip(reversed(range(len(self._run))), self._run):
            x = layer(x, bounds, None if left else batch.sample_index, rope, bias)
        if self.norm is not None:
            x = self.norm(x)
        return x if out is None else out.copy_(x)

    def _embedded(self, batch: Batch, starts: Tensor) -> Tensor:
        x = self.embed(batch.token_ids)
        if self.positions is not None:
            x.add_(self.positions(batch.positions))
        if self.types is None:
            return x
        if batch.second_start is None or self.types.num_positions < 2:
            return x.add_(self.types.table[0])
        token = torch.arange(len(x), dtype=torch.int32, device=x.device)
        row = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=len(starts) - 2)
        second = batch.second_start.index_select(0, row)
        return x.add_(self.types(((second > 0) & (batch.positions >= second)).long()))

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """The first layer and the last layer, which together launch all kernels."""
        whole, self._run = self._run, self._run[:1] + self._run[1:][-1:]
        try:
            yield
        finally:
            self._run = whole

    def is_run(self, number: int) -> bool:
        return any(layer is self.layers[number] for layer in self._run)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        raise TypeError("an encoder has no language model's head: its pooler reads hidden states")
