"""PagedSelfAttention: fused q|k|v projection, rotation and cache write, attention over the paged cache.

Thread: device. In: the residual stream [T, hidden] through the norm before the layer, the step's cos/sin and
AttentionMeta, this layer's caches (written). Out: attended values [T, num_heads * head_dim]; the layer has the output
projection. Three kernel calls, one more if the norm is not fused into a projection (engine/layers/norm.py), and one for
gates, which the query projection computes next to the queries. DenseSelfAttention is for bidirectional layers: one step
computes a whole input, and nothing is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.dealing import Section
from engine.base.model_config import LayerConfig, TextConfig
from engine.cache.spec import CacheSpec, LayerCache
from engine.cache.tokens import FullSpec, NothingSpec
from engine.cache.window import SlidingSpec
from engine.kernels.attention.dense import dense_attention
from engine.kernels.attention.paged import paged_attention
from engine.kernels.gate import multiply_by_sigmoid
from engine.kernels.gemm.pack import Placement
from engine.kernels.pages import pages_of
from engine.kernels.parallel.dealt_norm import Parts, dealt_squares, normalise_dealt
from engine.kernels.projection_norm import normalise_projections
from engine.kernels.rotate import apply_rope, qkv_rope_store
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope
from engine.layers.stream import Exchange
from engine.weights.rows import gates_queries, half_split, queries_keys_values
from engine.weights.table import Wanted


class Sinks:
    """Attention sinks: a learned logit per query head that is added to the softmax's denominator and has no value."""

    __slots__ = ("num_heads", "rows", "weight")

    weight: Tensor  # [num_heads] float32

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.rows = ((Section(num_heads),),)  # how ranks share the logits

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"sinks": (Wanted((self.num_heads,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces["sinks"]
        assert piece is not None
        self.weight = piece.to(placement.device, torch.float32, copy=True)


class HeadNorms:
    """The weights of LayerNorms with separate weights for each head, and without biases.

    A checkpoint has one tensor for all heads, or one module per head (text.split_head_norms).
    """

    __slots__ = ("eps", "first", "head_dim", "num_heads", "rotary_dim", "rows", "split", "weight")

    weight: Tensor  # [num_heads * head_dim] float32

    def __init__(self, text: TextConfig, layer: LayerConfig, num_heads: int) -> None:
        self.num_heads = num_heads
        self.first = 0  # the number of the first head of this rank
        self.rows = None if text.split_head_norms else ((Section(num_heads),),)  # how ranks share the weights
        self.head_dim = text.head_dim
        self.rotary_dim = layer.rope.rotary_dim if layer.rope.interleaved else 0
        self.split = text.split_head_norms
        self.eps = text.norm_eps

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        if self.split:
            return {"weight": (Wanted((self.head_dim,)),) * self.num_heads}
        return {"weight": (Wanted((self.num_heads, self.head_dim)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        found = torch.cat([piece.flatten() for piece in pieces["weight"] if piece is not None])
        self.weight = half_split(found, self.head_dim, self.rotary_dim).to(placement.device, torch.float32)


@dataclass(slots=True, eq=False)
class DealtNorm:
    """The norm over whole projections of which each rank has some heads: the ranks' sums of squares are exchanged."""

    exchange: Exchange
    queries: int  # numbers of the whole query projection
    keys: int
    copies: int  # ranks that have the same key heads

    def __call__(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
        """qkv [T, n] that begins with the rank's queries and keys, in place."""
        parts = Parts((len(q_weight), len(k_weight)), (self.queries, self.keys * self.copies), 0, 2)
        sums = self.exchange.total(dealt_squares(qkv, parts))
        normalise_dealt(qkv, sums, (q_weight, k_weight), parts, eps)


class PagedSelfAttention:
    """Causal grouped-query attention with rotary positions."""

    __slots__ = (
        "clip",
        "dealt_norm",
        "gate_width",
        "head_dim",
        "k_norm",
        "num_heads",
        "num_kv_heads",
        "q_norm",
        "qk_norm",
        "qkv",
        "scale",
        "sinks",
        "softcap",
        "span",
        "window",
    )

    q_norm: RMSNorm | HeadNorms | None
    k_norm: RMSNorm | HeadNorms | None
    dealt_norm: DealtNorm | None  # replaces the norm over a whole projection, if a rank has a part of it

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        self.num_heads = text.num_heads
        self.num_kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        self.scale = layer.scale
        self.softcap = layer.softcap
        self.window = layer.window
        self.span = -layer.window if layer.chunked else layer.window  # the kernels' convention: negative for chunks
        self.qkv = qkv_product(text, layer)
        self.qk_norm = text.qk_norm
        self.dealt_norm = None
        self.clip = text.qkv_clip
        self.gate_width = text.num_heads * text.head_dim if text.qkv_layout == "gated" else 0  # before the queries
        if text.qk_norm == "none":
            self.q_norm = self.k_norm = None
        elif text.qk_norm == "head layer norm":
            self.q_norm, self.k_norm = (HeadNorms(text, layer, heads) for heads in (text.num_heads, text.num_kv_heads))
        else:
            whole = text.qk_norm == "projection"
            self.q_norm, self.k_norm = norms = tuple(
                RMSNorm(heads * text.head_dim if whole else text.head_dim, text.norm_eps, text.norm_offset)
                for heads in (text.num_heads, text.num_kv_heads)
            )
            for norm, heads in zip(norms if whole else (), (text.num_heads, text.num_kv_heads)):
                norm.rows = ((Section(heads, text.head_dim),),)
        self.sinks = Sinks(text.num_heads) if layer.sinks else None

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """The cache of a layer of a model in `dtype`."""
        if self.window:
            return SlidingSpec(self.num_kv_heads, self.head_dim, dtype, self.window)
        return FullSpec(self.num_kv_heads, self.head_dim, dtype)

    def __call__(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Stores the tokens' keys and values; returns the attention output of each token, [T, num_heads * head_dim]."""
        # Queries have no variable here, so their memory is freed before anything else is allocated.
        if not self.gate_width:
            return self._attended(self.store(x, rope, meta, cache), meta, cache)
        projected = self._projected(x)
        attended = self._attended(self._stored(projected[:, self.gate_width :], rope, meta, cache), meta, cache)
        return multiply_by_sigmoid(attended, projected[:, : self.gate_width])

    def store(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Writes the tokens' keys and values; returns their queries [T, num_heads, head_dim]."""
        projected = self._projected(x)
        return self._stored(projected[:, self.gate_width :] if self.gate_width else projected, rope, meta, cache)

    def _attended(self, queries: Tensor, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """[T, num_heads * head_dim]."""
        sinks = None if self.sinks is None else self.sinks.weight
        keys, values, scales = pages_of(cache)
        return paged_attention(queries, keys, values, meta, self.scale, self.span, self.softcap, sinks, scales)

    def _stored(self, qkv: Tensor, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Writes the keys and values of qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]; returns its queries."""
        keys, values, scales = pages_of(cache)
        queries = qkv_rope_store(
            qkv,
            rope.cos,
            rope.sin,
            *self._head_norms(),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            keys,
            values,
            meta.slot_mapping,
            self.qk_norm == "head after rotation",
            scales,
        )
        if rope.query_scale is not None:
            queries *= rope.query_scale
        return queries

    def _projected(self, x: Normed) -> Tensor:
        """Queries, keys and values, [T, (num_heads + 2 * num_kv_heads) * head_dim]; before them the gates, if any."""
        qkv, q_norm, k_norm = self.qkv.of_normed(x), self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and self.qk_norm in ("projection", "head layer norm"):
            centre = self.qk_norm == "head layer norm"
            groups = (self.head_dim,) * 2 if centre else (len(q_norm.weight), len(k_norm.weight))
            if self.dealt_norm is None:
                normalise_projections(qkv, q_norm.weight, k_norm.weight, *groups, q_norm.eps, centre)
            else:
                self.dealt_norm(qkv, q_norm.weight, k_norm.weight, q_norm.eps)
        if self.clip:
            qkv.clamp_(-self.clip, self.clip)
        return qkv

    def _head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Arguments of the norm in qkv_rope_store: weights of queries, weights of keys, eps."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None or not self.qk_norm.startswith("head") or isinstance(q_norm, HeadNorms):
            return None, None, 0.0
        return q_norm.weight, k_norm.weight, q_norm.eps


class DenseSelfAttention(PagedSelfAttention):
    """Each token attends to all tokens of its input or, with a window, to those near it."""

    __slots__ = ()

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """Nothing is cached."""
        return NothingSpec()

    def __call__(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """The attention output of each token, [T, num_heads * head_dim]; the rows of `meta` cover all tokens."""
        projected = self._projected(x)
        heads = projected[:, self.gate_width :].unflatten(1, (-1, self.head_dim))
        values = heads[:, self.num_heads + self.num_kv_heads :]
        queries, keys = self._rotated(heads, rope)
        if rope.query_scale is not None:
            queries = queries * rope.query_scale
        bounds = meta.query_start
        made = dense_attention(queries, keys, values, bounds, self.scale, mixed_lengths=True, window=self.window)
        return multiply_by_sigmoid(made, projected[:, : self.gate_width]) if self.gate_width else made

    def _rotated(self, heads: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys; heads [T, num_heads + 2 * num_kv_heads, head_dim]."""
        q_norm, k_norm, eps = self._head_norms()
        split = [self.num_heads, self.num_kv_heads]
        both = heads[:, : sum(split)]
        if q_norm is None:
            queries, keys = apply_rope(both, rope.cos, rope.sin).split(split, 1)
            return queries, keys
        late = self.qk_norm == "head after rotation"
        queries, keys = (
            apply_rope(part, rope.cos, rope.sin, norm, eps, late)
            for part, norm in zip(both.split(split, 1), (q_norm, k_norm))
        )
        return queries, keys

    def store(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        raise TypeError("an input is computed as a whole: every step has a token that is read")


def self_attention(text: TextConfig, layer: LayerConfig) -> PagedSelfAttention:
    """The attention that a layer's configuration describes."""
    return (PagedSelfAttention if layer.causal else DenseSelfAttention)(text, layer)


def output_product(text: TextConfig) -> Linear:
    """Attention's output projection, from all heads to the stream."""
    product = Linear(text.num_heads * text.head_dim, text.hidden_size, bias=text.o_bias)
    product.columns = (Section(text.num_heads, text.head_dim),)
    return product


def qkv_product(text: TextConfig, layer: LayerConfig) -> Linear:
    """The projection of queries, keys and values, with rows in the kernels' order."""
    q_size, kv_size = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    queries, keys = Section(text.num_heads, text.head_dim), Section(text.num_kv_heads, text.head_dim)
    if text.qkv_layout == "gated":
        product = Linear(text.hidden_size, 2 * q_size, kv_size, kv_size, bias=text.qkv_bias)
        product.rows = ((Section(text.num_heads, 2 * text.head_dim),), (keys,), (keys,))
        product.arrange = lambda number, rows: rows if number else gates_queries(rows, text.head_dim)
        return product
    sizes = (q_size, kv_size, kv_size) if text.qkv_layout == "apart" else (q_size + 2 * kv_size,)
    product = Linear(text.hidden_size, *sizes, bias=text.qkv_bias)
    product.rows = ((queries,), (keys,), (keys,)) if text.qkv_layout == "apart" else ((queries, keys, keys),)
    if text.qkv_layout == "by head":
        each = text.num_heads // text.num_kv_heads
        product.rows = ((Section(text.num_kv_heads, (each + 2) * text.head_dim),),)
        product.arrange = lambda _, rows: queries_keys_values(rows, each, text.head_dim)
    elif layer.rope.interleaved:
        turned = (q_size, kv_size, 0) if text.qkv_layout == "apart" else (q_size + kv_size,)  # rows of each piece

        def arrange(number: int, rows: Tensor) -> Tensor:
            """Reorders the rows of queries and keys, not of values."""
            both, rest = rows[: turned[number]], rows[turned[number] :]
            split = half_split(both, text.head_dim, layer.rope.rotary_dim) if len(both) else both
            return torch.cat([split, rest]) if len(rest) else split

        product.arrange = arrange
    return product
