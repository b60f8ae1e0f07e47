"""A layer of Whisper's decoder: attention to the text so far, attention to the encoder's rows, and an MLP.

Thread: device. In: the residual stream, and attention metadata for text and audio. Out: the stream, and in the KV cache
each token's keys and values: cross-attention's for audio tokens, self-attention's for text tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.model_config import TextConfig
from engine.cache.spec import LayerCache
from engine.encoders.sound import EPS
from engine.kernels.activation import gelu
from engine.kernels.attention.paged import paged_attention
from engine.kernels.pages import pages_of
from engine.kernels.rotate import qkv_rope_store
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.layers.rope import Rope


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """Metadata of a step for both attentions; every token is a separate row."""

    text: AttentionMeta
    sound: AttentionMeta
    rope: Rope  # a rotation by angle 0


class WhisperLayer:
    """A decoder layer; keys have no bias."""

    def __init__(self, text: TextConfig) -> None:
        size = text.hidden_size
        self.num_heads, self.head_dim = text.num_heads, text.head_dim
        self.self_norm, self.cross_norm, self.mlp_norm = (LayerNorm(size, EPS) for _ in range(3))
        self.qkv = Linear(size, size, size, size, bias=(True, False, True))
        self.cross_q = Linear(size, size, bias=True)
        self.cross_kv = Linear(size, size, size, bias=(False, True))
        self.out, self.cross_out = Linear(size, size, bias=True), Linear(size, size, bias=True)
        self.fc1 = Linear(size, text.intermediate_size, bias=True)
        self.fc2 = Linear(text.intermediate_size, size, bias=True)

    def __call__(self, x: Tensor, views: Views, cache: LayerCache, overlay: tuple[Tensor, Tensor] | None) -> None:
        """Adds to x [T, hidden]; `overlay`: which tokens are audio, [T, 1], and their rows [T, hidden]."""
        size, scale, (keys, values, codes) = x.shape[1], self.head_dim**-0.5, pages_of(cache)
        qkv = self.qkv(self.self_norm(x))
        if overlay is not None:
            visible, rows = overlay
            qkv[:, size:] = torch.where(visible, self.cross_kv(rows), qkv[:, size:])
        queries = self._store(qkv, views.rope, cache, views.text.slot_mapping)
        self.out.add_to(x, paged_attention(queries, keys, values, views.text, scale, scales=codes))
        queries = self.cross_q(self.cross_norm(x)).view(queries.shape)
        self.cross_out.add_to(x, paged_attention(queries, keys, values, views.sound, scale, scales=codes))
        self.fc2.add_to(x, gelu(self.fc1(self.mlp_norm(x))))

    def store_sound(self, rows: Tensor, rope: Rope, cache: LayerCache, slots: Tensor) -> None:
        """Computes the keys and values of cross-attention from the encoder's rows [n, hidden], and writes them."""
        queries = rows.new_zeros(rows.shape)
        self._store(torch.cat([queries, self.cross_kv(rows)], dim=1), rope, cache, slots)

    def _store(self, qkv: Tensor, rope: Rope, cache: LayerCache, slots: Tensor) -> Tensor:
        """Stores keys and values in the cache; returns the queries [T, num_heads, head_dim]."""
        heads, (keys, values, scales) = self.num_heads, pages_of(cache)
        return qkv_rope_store(
            qkv, rope.cos, rope.sin, None, None, 0.0, heads, heads, self.head_dim, keys, values, slots, scales=scales
        )
