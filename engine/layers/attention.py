"""PagedSelfAttention: fused q|k|v product, rotation and cache write, attention over the paged cache, output product.

Thread: device. In: the residual stream [T, hidden] through the norm before the layer, the norm after it, the step's
cos/sin and AttentionMeta, this layer's caches (written). Out: the stream, to which the output product added in place,
through the norm after. Four kernel calls, and one for a norm that no product does (engine/layers/norm.py). The last
layer of a model goes on with the rows that are read and leaves the stream of the others behind.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.base import AttentionMeta
from engine.attention.paged import paged_attention
from engine.cache.spec import CacheSpec, FullSpec, SlidingSpec
from engine.kernels.qkv import qkv_rope_store
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm
from engine.model_config import LayerConfig, TextConfig


class PagedSelfAttention:
    """Causal grouped-query attention with rotary positions."""

    __slots__ = ("head_dim", "k_norm", "num_heads", "num_kv_heads", "o", "q_norm", "qkv", "scale", "window")

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        self.num_heads = text.num_heads
        self.num_kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        self.scale = text.head_dim**-0.5
        self.window = layer.window
        q_size, kv_size = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
        self.qkv = Linear(text.hidden_size, q_size, kv_size, kv_size, bias=text.qkv_bias)
        self.o = Linear(q_size, text.hidden_size, bias=text.o_bias)
        self.q_norm = RMSNorm(text.head_dim, text.norm_eps) if text.qk_norm else None
        self.k_norm = RMSNorm(text.head_dim, text.norm_eps) if text.qk_norm else None

    def cache_spec(self) -> CacheSpec:
        if self.window:
            return SlidingSpec(self.num_kv_heads, self.head_dim, self.window)
        return FullSpec(self.num_kv_heads, self.head_dim)

    def __call__(
        self,
        x: Normed,
        after: RMSNorm,
        cos: Tensor,
        sin: Tensor,
        meta: AttentionMeta,
        k_cache: Tensor,
        v_cache: Tensor,
        index: Tensor | None = None,
    ) -> Normed:
        """With `index`, int64 [S], of those tokens only: a stream [S, hidden] of its own."""
        # Queries are not named here: they are given back before anything else is allocated.
        attended = paged_attention(
            self.store(x, cos, sin, meta, k_cache, v_cache), k_cache, v_cache, meta, self.scale, self.window
        )  # [T, num_heads * head_dim]
        residual = x.residual
        if index is not None:
            attended, residual = attended.index_select(0, index), residual.index_select(0, index)
        return self.o.add_then(after, residual, attended)

    def store(
        self, x: Normed, cos: Tensor, sin: Tensor, meta: AttentionMeta, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Writes the tokens' keys and values; returns their queries [T, num_heads, head_dim]."""
        q_norm, k_norm = self.q_norm, self.k_norm
        return qkv_rope_store(
            self.qkv.of_normed(x),
            cos,
            sin,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            k_cache,
            v_cache,
            meta.slot_mapping,
        )
