"""Caches of every token: a token's data is read until its request ends.

In: numbers of the model. Out: specs of layers whose blocks a row holds to its end. A chunk may end anywhere, every full
block is named in the prefix index, and a chain of such names identifies the whole prefix (_fast/kinds).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from _fast import kinds
from engine.cache.spec import CacheKind, KeyValueSpec, LayerCache

EVERY_TOKEN = CacheKind(kinds.FULL)


@dataclass(frozen=True, slots=True)
class FullSpec(KeyValueSpec):
    """Keys and values; a token reads those of all earlier tokens."""

    @property
    def kind(self) -> CacheKind:
        return EVERY_TOKEN


@dataclass(frozen=True, slots=True)
class GuestSpec(FullSpec):
    """Keys and values of a drafter's layer, in the blocks of another group's layers, whose spec has `shared` = host."""

    host: Hashable = field(default=None, kw_only=True)

    @property
    def shared(self) -> Hashable:
        return (FullSpec, self.num_kv_heads, self.head_dim) if self.host is None else self.host


@dataclass(frozen=True, slots=True)
class NothingSpec:
    """No bytes, for models that compute a prompt in one step. A slot holds one block without bytes."""

    @property
    def kind(self) -> CacheKind:
        return EVERY_TOKEN

    @property
    def shared(self) -> Hashable:
        return (type(self),)

    def block_bytes(self, block_size: int) -> int:
        return 0

    def views(self, pages: Tensor, block_size: int) -> LayerCache:
        return ()
