"""What a layer stores: one spec per decoder layer, declared by the model, read by cache/layout.

In: numbers of the model. Out: bytes of a block, the layer's cache as views of pages, and its kind: how a row uses
blocks. Layers whose specs have equal `shared` share block tables, whatever the bytes of their numbers. Each kind of
cache is a file here (tokens, window) and a branch in _fast/kinds, where the scheduler asks which blocks a row needs,
where a chunk may end and what the prefix index names. States (state) have runs of blocks in the place of tables. The
engine hands a LayerCache to its layer unread.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from _fast import kinds
from engine.kernels.pages import given_scales

LayerCache = tuple[Tensor, ...]  # what a layer reads and writes; only the layer and its spec know what the tensors are


@dataclass(frozen=True, slots=True)
class CacheKind:
    """How a row uses the blocks of a group of layers; the rules are those of _fast/kinds."""

    number: int  # kinds.FULL, kinds.SLIDING or kinds.STATE
    # The kind's own number; sliding: how many of the last tokens are read, the newest included; state: how many
    # positions a step takes into the state at once.
    window: int = 0

    @property
    def has_tables(self) -> bool:
        """Whether blocks hold tokens, which block tables name."""
        return self.number != kinds.STATE

    @property
    def lasts(self) -> bool:
        """Whether a row holds every block to its end, as blocks of tokens."""
        return self.has_tables and kinds.lasts(self.number, self.window)

    def row_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Blocks of tokens that a row of so many holds at most; `max_chunk`: tokens that it computes in a step."""
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
        """Bytes that a block of so many tokens takes in this layer."""

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        """The layer's cache at the beginning of each of `pages`, uint8 [num_blocks, page_bytes].

        Layers of other groups have the same pages in other blocks, so nothing is allocated here.
        """


@dataclass(frozen=True, slots=True)
class KeyValueSpec:
    """Bytes of keys and values, every KV head's side by side in a page; behind codes of e4m3 the scales of these.

    Of which tokens they are read is up to the kind: FullSpec in tokens, SlidingSpec in window.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # Scales of e4m3 that the checkpoint has, of keys and of values of each head; None: made for each token.
    given: tuple[tuple[float, ...], tuple[float, ...]] | None = field(default=None, kw_only=True)

    @property
    def makes_scales(self) -> bool:
        """Whether a token's scales are stored next to its codes."""
        return self.dtype is torch.float8_e4m3fn and self.given is None

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
        """(keys, values), each [num_blocks, num_kv_heads, block_size, head_dim], blocks a page apart; and their scales,
        float32 [num_blocks, num_kv_heads, block_size], where codes have them."""
        heads, size = self.num_kv_heads, 2 * self.num_kv_heads * block_size * self.head_dim * self.dtype.itemsize
        numbers = pages[:, :size].view(self.dtype).unflatten(1, (2, heads, block_size, self.head_dim)).unbind(1)
        if self.given is not None:
            return *numbers, *given_scales(*self.given, len(pages), block_size, pages.device)
        if not self.makes_scales:
            return numbers
        behind = pages[:, self._number_bytes(block_size) : self.block_bytes(block_size)].view(torch.float32)
        return *numbers, *behind.unflatten(1, (2, heads, block_size)).unbind(1)
