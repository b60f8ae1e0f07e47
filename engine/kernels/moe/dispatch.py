"""Chooses the kernel for products of pairs with float experts: a table, read from top to bottom.

The first kernel that takes a product computes it, and the last kernel takes every product.

    moe/grouped_persistent   sorted pairs, if moe/tiles has a persistent tile and rows are aligned for descriptors
    moe/grouped              all other products

Users: moe/dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.moe.grouped import Tile, launch_grouped, tile_of
from engine.kernels.moe.grouped_persistent import persistent_product, takes
from engine.kernels.moe.sort import Pairs
from engine.kernels.moe.tiles import Shape, count_of, measured_tile
from engine.kernels.target import target


class Product(NamedTuple):
    """Each pair's row of x times the weight [E, N, K] of the pair's expert; arguments as in moe/grouped."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    pairs: Pairs
    activation: Activation | None
    weights: Tensor | None = None
    of_tokens: bool = False
    invariant: bool = False  # a row's bits do not depend on other rows: one tile for any number of pairs

    @property
    def sized_for(self) -> int:
        """The number of pairs for which the tile is chosen."""
        return count_of(self.pairs, len(self.weight), self.invariant)

    def measured(self) -> Tile | None:
        """The tile of moe/tiles, for 16-bit values."""
        (experts, rows, depth), gated = self.weight.shape, self.activation is not None
        if self.weight.element_size() != 2:
            return None
        shape = Shape(experts, rows // 2 if gated else rows, depth, gated)
        return measured_tile("bfloat16", shape, self.sized_for / experts)


class Kernel(NamedTuple):
    """A row of a table."""

    name: str  # the kernel's file
    cut: Callable[[Product], Tile | None]  # None: the kernel does not take the product
    launch: Callable[..., Tensor]  # x, weight, bias, pairs, activation, tile, weights, of_tokens


def persistent(product: Product) -> Tile | None:
    tile = product.measured()
    return tile if tile is not None and tile.persistent and takes(product.x, product.weight) else None


def grouped(product: Product) -> Tile:
    tile = product.measured()
    if tile is not None and not tile.persistent:
        return tile
    gated, size = product.activation is not None, product.weight.element_size()
    return tile_of(target(), product.sized_for, len(product.weight), gated, size)


FLOATS = (
    Kernel("moe/grouped_persistent", persistent, persistent_product),
    Kernel("moe/grouped", grouped, launch_grouped),
)


def choose(product: Product) -> tuple[Kernel, Tile]:
    """The kernel that computes this product, and its tile."""
    return next((kernel, tile) for kernel in FLOATS if (tile := kernel.cut(product)) is not None)
