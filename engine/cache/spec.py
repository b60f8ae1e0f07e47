"""Specs of layers' caches: one per decoder layer, declared by the model, read by cache/layout.

In: numbers of the model. Out: bytes of a block, the layer's cache as views of pages, and its kind, which determines how
a row uses blocks. Layers whose specs have equal `shared` share block tables, even if their bytes differ. Each kind of
cache has a file here (tokens, window) and a branch in _fast/kinds, which defines for the scheduler the blocks that a
row needs, where a chunk may end, and what the prefix index names. States (state) have runs of blocks instead of tables.
The engine passes a LayerCache to its layer without reading it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from _fast import kinds
from engine.base.dealing import Section, share
from engine.kernels.pages import given_scales

LayerCache = tuple[Tensor, ...]  # a layer's cache; only the layer and its spec know what the tensors are


@dataclass(frozen=True, slots=True)
class CacheKind:
    """How a row uses the blocks of a group of layers, by the rules of _fast/kinds."""

    number: int  # kinds.FULL, kinds.SLIDING or kinds.STATE
    # The kind's parameter. Sliding: number of last tokens that are read, including the newest. State: number of
    # positions that are folded into the state at once.
    window: int = 0

    @property
    def has_tables(self) -> bool:
        """Whether blocks hold tokens and are listed in block tables."""
        return self.number != kinds.STATE

    @property
    def lasts(self) -> bool:
        """Whether a row holds every block of tokens to its end."""
        return self.has_tables and kinds.lasts(self.number, self.window)

    def row_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Return the most blocks of a row of num_tokens tokens; max_chunk: most tokens that it computes in a step."""
        return kinds.row_blocks(self.number, self.window, num_tokens, block_size, max_chunk)


class CacheSpec(Protocol):
    """One layer's cache."""

    @property
    def kind(self) -> CacheKind:
        """How a row uses the blocks of the layer's group."""

    @property
    def shared(self) -> Hashable:
        """Equal for layers that share block tables."""

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of block_size tokens in this layer."""

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        """Return the layer's cache as views of the beginning of each page; pages: uint8 [num_blocks, page_bytes].

        Layers of other groups use the same pages in other blocks, so nothing is allocated here.
        """


@dataclass(frozen=True, slots=True)
class KeyValueSpec:
    """Keys and values: each KV head's numbers are contiguous in a page; scales follow codes of e4m3.

    The kind determines which tokens' keys and values are read: FullSpec in tokens, SlidingSpec in window.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # The checkpoint's scales of e4m3 for keys and values, per head; None: scales are computed for each token. Of
    # several ranks: the scales of all heads, of which `of_rank` keeps one rank's.
    given: tuple[tuple[float, ...], tuple[float, ...]] | None = field(default=None, kw_only=True)

    @property
    def makes_scales(self) -> bool:
        """Whether a token's scales are stored next to its codes."""
        return self.dtype is torch.float8_e4m3fn and self.given is None

    def of_rank(self, rank: int, ranks: int) -> Self:
        """The cache of one of so many ranks."""
        if self.given is None:
            return self
        keys, values = self.given
        first, end = share(Section(len(keys)), rank, ranks)
        return replace(self, given=(keys[first:end], values[first:end]))

    @property
    def shared(self) -> Hashable:
        return type(self), self.num_kv_heads, self.head_dim

    def block_bytes(self, block_size: int) -> int:
        scales = 2 * self.num_kv_heads * block_size * torch.float32.itemsize
        return self._number_bytes(block_size) + (scales if self.makes_scales else 0)

    def _number_bytes(self, block_size: int) -> int:
        size = 2 * self.num_kv_heads * block_size * self.head_dim * self.dtype.itemsize
        return -(-size // torch.float32.itemsize) * torch.float32.itemsize

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        """Return (keys, values), each [num_blocks, num_kv_heads, block_size, head_dim], blocks a page apart; if codes
        have scales, also the scales, float32 [num_blocks, num_kv_heads, block_size]."""
        heads, size = self.num_kv_heads, 2 * self.num_kv_heads * block_size * self.head_dim * self.dtype.itemsize
        numbers = pages[:, :size].view(self.dtype).unflatten(1, (2, heads, block_size, self.head_dim)).unbind(1)
        if self.given is not None:
            return *numbers, *given_scales(*self.given, len(pages), block_size, pages.device)
        if not self.makes_scales:
            return numbers
        behind = pages[:, self._number_bytes(block_size) : self.block_bytes(block_size)].view(torch.float32)
        return *numbers, *behind.unflatten(1, (2, heads, block_size)).unbind(1)
