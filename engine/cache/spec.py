"""What a layer keeps per token: one spec per decoder layer, declared by the model, read by cache/layout.

In: numbers of the model. Out: bytes of a block, and the layer's cache as views of pages. Layers whose specs have equal
`shared` share block tables, whatever the bytes of their numbers. A new kind of cache is a spec of its own: the engine
hands its LayerCache to the layer unread. Which blocks a token still needs is decided in _fast/tables, by `kind` and
`window`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.pages import given_scales

KIND_FULL = 0  # of a group, as _fast/types.pxd has them
KIND_SLIDING = 1

LayerCache = tuple[Tensor, ...]  # what a layer reads and writes; only the layer and its spec know what the tensors are


class CacheSpec(Protocol):
    """One layer's cache."""

    @property
    def shared(self) -> Hashable:
        """Equal for layers that share block tables."""

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
    """Keys and values of every KV head, side by side in a page; behind codes of e4m3 the scales that come with them."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # Scales of e4m3 that the checkpoint has, of keys and of values of each head; None: made for each token.
    given: tuple[tuple[float, ...], tuple[float, ...]] | None = field(default=None, kw_only=True)

    @property
    def makes_scales(self) -> bool:
        """Whether a token's scales are stored beside its codes."""
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
    def shared(self) -> Hashable:
        return (type(self),)

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
    def shared(self) -> Hashable:
        return type(self), self.num_kv_heads, self.head_dim, self.window

    @property
    def kind(self) -> int:
        return KIND_SLIDING


@dataclass(frozen=True, slots=True)
class TapsSpec:
    """A row of numbers for each of the last `window` tokens, the newest included: what a short convolution reads."""

    width: int
    dtype: torch.dtype
    window: int

    @property
    def shared(self) -> Hashable:
        return type(self), self.width, self.window

    @property
    def kind(self) -> int:
        return KIND_SLIDING

    def block_bytes(self, block_size: int) -> int:
        return self.width * block_size * self.dtype.itemsize

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        """[num_blocks, block_size, width], blocks a page apart."""
        numbers = pages[:, : self.block_bytes(block_size)].view(self.dtype)
        return (numbers.unflatten(1, (block_size, self.width)),)
