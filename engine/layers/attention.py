"""PagedSelfAttention: fused q|k|v product, rotation and cache write, attention over the paged cache.

Thread: device. In: the residual stream [T, hidden] through the norm before the layer, the step's cos/sin and
AttentionMeta, this layer's caches (written). Out: attended values [T, num_heads * head_dim]; the output product is the
layer's. Three kernel calls, and one for a norm that no product does (engine/layers/norm.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.cache.spec import CacheSpec, FullSpec, LayerCache, SlidingSpec
from engine.kernels.attention.paged import paged_attention
from engine.kernels.rotate import qkv_rope_store
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm
from engine.model_config import LayerConfig, TextConfig
from engine.weights.table import Shape

Rope = tuple[Tensor, Tensor]  # cos, sin of the step's positions, [T, rotary_dim / 2] float32


class Sinks:
    """A learned logit per query head that joins the softmax's sum and has no value."""

    __slots__ = ("num_heads", "weight")

    weight: Tensor  # [num_heads] float32

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def expects(self) -> dict[str, tuple[Shape | None, ...]]:
        return {"sinks": ((self.num_heads,),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], dtype: torch.dtype, device: str) -> None:
        (piece,) = pieces["sinks"]
        assert piece is not None
        self.weight = piece.to(device, torch.float32, copy=True)


class PagedSelfAttention:
    """Causal grouped-query attention with rotary positions."""

    __slots__ = (
        "head_dim",
        "k_norm",
        "num_heads",
        "num_kv_heads",
        "q_norm",
        "qkv",
        "scale",
        "sinks",
        "softcap",
        "window",
    )

    def __init__(self, text: TextConfig, layer: LayerConfig) -> None:
        self.num_heads = text.num_heads
        self.num_kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        self.scale = layer.scale
        self.softcap = layer.softcap
        self.window = layer.window
        q_size, kv_size = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
        self.qkv = Linear(text.hidden_size, q_size, kv_size, kv_size, bias=text.qkv_bias)
        self.q_norm = RMSNorm(text.head_dim, text.norm_eps, text.norm_offset) if text.qk_norm else None
        self.k_norm = RMSNorm(text.head_dim, text.norm_eps, text.norm_offset) if text.qk_norm else None
        self.sinks = Sinks(text.num_heads) if layer.sinks else None

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """What a layer of a model in `dtype` keeps."""
        if self.window:
            return SlidingSpec(self.num_kv_heads, self.head_dim, dtype, self.window)
        return FullSpec(self.num_kv_heads, self.head_dim, dtype)

    def __call__(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Stores the tokens' keys and values; returns what each token attended, [T, num_heads * head_dim]."""
        sinks = None if self.sinks is None else self.sinks.weight
        keys, values = cache
        # Queries are not named here: they are given back before anything else is allocated.
        return paged_attention(
            self.store(x, rope, meta, cache), keys, values, meta, self.scale, self.window, self.softcap, sinks
        )

    def store(self, x: Normed, rope: Rope, meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Writes the tokens' keys and values; returns their queries [T, num_heads, head_dim]."""
        q_norm, k_norm = self.q_norm, self.k_norm
        keys, values = cache
        return qkv_rope_store(
            self.qkv.of_normed(x),
            *rope,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            keys,
            values,
            meta.slot_mapping,
        )
