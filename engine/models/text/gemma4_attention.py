"""Attention of Gemma 4: normalised values, keys that are also values, and layers that read other layers' keys.

Thread: device. In: the normalised stream of a layer. Out: the heads' outputs. LayerConfig has the differences between
layers; gemma4_text.py has the rest of the decoder.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.model_config import LayerConfig, TextConfig
from engine.cache.spec import LayerCache
from engine.kernels.gemm.pack import Placement
from engine.kernels.projection_norm import normalise_projections
from engine.kernels.rotate import apply_rope
from engine.layers.attention import PagedSelfAttention
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope
from engine.weights.table import Wanted


class Projections(Linear):
    """Projections of queries, keys and values; a checkpoint may have fewer matrices: `stored` maps pieces to
    matrices."""

    __slots__ = ("ones", "stored")

    ones: Tensor  # [values] float32: weights of a norm without weights

    def __init__(self, hidden_size: int, sizes: tuple[int, ...], stored: tuple[int, ...], bias: bool) -> None:
        super().__init__(hidden_size, *sizes, bias=bias)
        self.stored = stored

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        wanted = super().expects()
        return {
            kind: tuple(pieces[self.stored.index(n)] if n in self.stored else None for n in range(3))
            for kind, pieces in wanted.items()
        }

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        super().fill({kind: [given[n] for n in self.stored] for kind, given in pieces.items()}, placement)
        self.ones = torch.ones(self.out_features[-1], device=placement.device)


class Attention(PagedSelfAttention):
    """Attention with normalised values; a layer that reads another layer's keys and values has queries only."""

    __slots__ = ("queries_only",)

    qkv: Projections

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        super().__init__(text, layer)
        self.queries_only = layer.kv_shared_with is not None
        kv_size = self.num_kv_heads * self.head_dim
        sizes: tuple[int, ...] = (self.num_heads * self.head_dim, kv_size, kv_size)
        stored: tuple[int, ...] = (0, 1, 2)
        if self.queries_only:
            sizes, stored = sizes[:1], (0,)
            self.k_norm = None
        elif layer.values_are_keys:
            stored = (0, 1, 1)
        rows = self.qkv.rows
        self.qkv = Projections(text.hidden_size, sizes, stored, text.qkv_bias)
        self.qkv.rows = rows

    def __call__(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        if not self.window and meta.last_keys is not None:  # bidirectional attention only in layers with a window
            meta = replace(meta, last_keys=None)
        return super().__call__(x, rope, meta, cache)

    def store(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        if not self.queries_only:
            return super().store(x, rope, meta, cache)
        assert isinstance(self.q_norm, RMSNorm), "queries have a norm"
        heads = self.qkv.of_normed(x).unflatten(1, (self.num_heads, self.head_dim))
        return apply_rope(heads, rope.cos, rope.sin, self.q_norm.weight, self.q_norm.eps)

    def _projected(self, x: Normed) -> Tensor:
        qkv = super()._projected(x)
        assert isinstance(self.k_norm, RMSNorm), "keys have a norm"
        ones = self.qkv.ones
        normalise_projections(qkv[:, -len(ones) :], ones, ones[:0], self.head_dim, 1, self.k_norm.eps, centre=False)
        return qkv
