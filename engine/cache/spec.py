"""What a layer keeps per token: one spec per decoder layer, declared by the model, read by cache/layout.

In: numbers of the model. Out: bytes of a block, and the layer's cache as views of pages. Layers with equal specs share
block tables. A new kind of cache is a spec of its own: the engine hands its LayerCache to the layer unread. Which
blocks a token still needs is decided in _fast/tables, by `kind` and `window`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

KIND_FULL = 0  # of a group, as _fast/types.pxd has them
KIND_SLIDING = 1

LayerCache = tuple[Tensor, ...]  # what a layer reads and writes; only the layer and its spec know what the tensors are


class CacheSpec(Protocol):
    """One layer's cache; equal specs are equal as keys."""

    @property
    def kind(self) -> int:
        """KIND_FULL or KIND_SLIDING."""

    @property
    def window(self) -> int:
        """How many of the last tokens are read, the newest included; 0: all."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes that a block of so many tokens takes in this layer."""

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        """The layer's cache at the beginning of each of `pages`, uint8 [num_blocks, page_bytes].

        Layers of other groups have the same pages in other blocks, so nothing is allocated here.
        """


@dataclass(frozen=True, slots=True)
class KeyValueSpec:
    """Keys and values of every KV head, side by side in a page."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        return 2 * self.num_kv_heads * block_size * self.head_dim * self.dtype.itemsize

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        """(keys, values), each [num_blocks, num_kv_heads, block_size, head_dim], blocks a page apart."""
        numbers = pages[:, : self.block_bytes(block_size)].view(self.dtype)
        return numbers.unflatten(1, (2, self.num_kv_heads, block_size, self.head_dim)).unbind(1)


@dataclass(frozen=True, slots=True)
class FullSpec(KeyValueSpec):
    """Every earlier token is read."""

    @property
    def kind(self) -> int:
        return KIND_FULL

    @property
    def window(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class NothingSpec:
    """Nothing is kept: of models that compute a prompt in one step. A slot holds one block of no bytes."""

    @property
    def kind(self) -> int:
        return KIND_FULL

    @property
    def window(self) -> int:
        return 0

    def block_bytes(self, block_size: int) -> int:
        return 0

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        return ()


@dataclass(frozen=True, slots=True)
class SlidingSpec(KeyValueSpec):
    """Only the last `window` tokens, the newest included, are read."""

    window: int

    @property
    def kind(self) -> int:
        return KIND_SLIDING
