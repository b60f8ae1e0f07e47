"""Caches of the last tokens: a token's data is read by the `window` tokens from it on, including itself.

In: numbers of the model. Out: specs of layers whose blocks are freed when the window has passed them. A chunk may end
anywhere, and every full block is named in the prefix index while the row holds it (_fast/kinds).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from _fast import kinds
from engine.cache.spec import CacheKind, KeyValueSpec, LayerCache


@dataclass(frozen=True, slots=True)
class SlidingSpec(KeyValueSpec):
    """Keys and values; a token reads those of the last `window` tokens, including itself."""

    window: int

    @property
    def kind(self) -> CacheKind:
        return CacheKind(kinds.SLIDING, self.window)

    @property
    def shared(self) -> Hashable:
        return type(self), self.num_kv_heads, self.head_dim, self.window


@dataclass(frozen=True, slots=True)
class TapsSpec:
    """A row of numbers for each of the last `window` tokens, including the newest; a short convolution reads them."""

    width: int
    dtype: torch.dtype
    window: int

    @property
    def kind(self) -> CacheKind:
        return CacheKind(kinds.SLIDING, self.window)

    @property
    def shared(self) -> Hashable:
        return type(self), self.width, self.window

    def block_bytes(self, block_size: int) -> int:
        return self.width * block_size * self.dtype.itemsize

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        """Return [num_blocks, block_size, width], blocks a page apart."""
        numbers = pages[:, : self.block_bytes(block_size)].view(self.dtype)
        return (numbers.unflatten(1, (block_size, self.width)),)
