"""What a layer keeps per token: one spec per decoder layer, declared by the model, read by cache/layout.

In: numbers of the model. Out: groups of equal layers and bytes per block. Layers with equal specs share a block table.
A spec says what must be kept; when a block may be dropped (outside the window) is the scheduler's affair.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Keys and values of every KV head for one token of one layer."""

    num_kv_heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        """Numbers (not bytes) that one token takes in one layer: its key and its value."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class FullSpec(CacheSpec):
    """Every earlier token is read."""


@dataclass(frozen=True, slots=True)
class SlidingSpec(CacheSpec):
    """Only the last `window` tokens, the newest included, are read."""

    window: int
