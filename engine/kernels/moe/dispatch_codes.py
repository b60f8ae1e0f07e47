"""Chooses the kernel for products of pairs with quantised experts and float inputs: a table, read from top to bottom.

The first kernel that takes a product computes it, and the last kernel takes every product.

    moe/pairs_float8   few unsorted pairs in bfloat16 with FP8 experts
    moe/pairs          the pairs of one token in bfloat16 with MXFP4 experts
    moe/values         sorted pairs in bfloat16 on sm_90
    moe/mxfp4          other pairs with MXFP4 experts
    moe/coded          all other products

Users: moe/coded_weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.groups import Packed
from engine.kernels.moe.coded import coded_product_reference, coded_tile, launch_coded_product, stages
from engine.kernels.moe.grouped import Tile
from engine.kernels.moe.mxfp4 import is_mxfp4, launch_mxfp4_product, mxfp4_tile
from engine.kernels.moe.pairs import launch_pairs
from engine.kernels.moe.pairs import takes as takes_token
from engine.kernels.moe.pairs_float8 import launch_pairs_float8
from engine.kernels.moe.pairs_float8 import takes as takes_pairs
from engine.kernels.moe.sort import Pairs
from engine.kernels.moe.tiles import Shape, count_of, measured_tile
from engine.kernels.moe.values import launch_values_product, values_tile
from engine.kernels.moe.values import takes as takes_values
from engine.kernels.target import target


class Product(NamedTuple):
    """Each pair's row of x times the weight [E * N, K] of the pair's expert; arguments as in moe/coded."""

    x: Tensor
    weight: Packed
    experts: int
    bias: Tensor | None
    pairs: Pairs
    activation: Activation | None
    weights: Tensor | None = None
    invariant: bool = False  # a row's bits do not depend on other rows: one tile for any number of pairs
    tile: Tile | None = None  # replaces the tile of moe/tiles
    first: bool = True  # of both products of a layer; see moe/pairs

    @property
    def gated(self) -> bool:
        return self.activation is not None

    @property
    def each(self) -> float:
        """Average pairs per expert, for which the tile is chosen."""
        return count_of(self.pairs, self.experts, self.invariant) / self.experts

    def measured(self) -> Tile | None:
        """The tile of moe/tiles, for 16-bit values."""
        weight = self.weight
        if self.tile is not None or self.x.element_size() != 2:
            return self.tile
        form = "MXFP4" if is_mxfp4(weight) else f"{weight.kind.name} by {weight.group}"
        width = len(weight.codes) // self.experts // (2 if self.gated else 1)
        return measured_tile(form, Shape(self.experts, width, weight.depth, self.gated), self.each)


class Kernel(NamedTuple):
    """A row of a table."""

    name: str  # the kernel's file
    cut: Callable[[Product], Tile | bool | None]  # True: the kernel divides the product itself; falsy: not taken
    launch: Callable[[Product, Any], Tensor]  # product, cut


def pairs_of_float8(product: Product) -> bool:
    return takes_pairs(product.x, product.weight, product.pairs)


def pairs_of_a_token(product: Product) -> bool:
    return by_token(product.x, product.weight, product.pairs)


def by_token(x: Tensor, weight: Packed, pairs: Pairs) -> bool:
    """Whether the pairs of a token may share its row in products without an activation too."""
    return is_mxfp4(weight) and takes_token(x, pairs)


def values(product: Product) -> Tile | None:
    if not takes_values(product.x, product.weight, product.pairs):
        return None
    tile = product.measured() or values_tile(product.each, product.gated)
    return tile if tile.values else None


def mxfp4(product: Product) -> Tile | None:
    if not is_mxfp4(product.weight):
        return None
    tile = product.measured()
    if tile is None or tile.values:
        tile = mxfp4_tile(target(), product.each, product.x.element_size(), product.gated)
    return tile


def coded(product: Product) -> Tile:
    tile, weight = product.measured(), product.weight
    if tile is None or tile.values:
        tile = coded_tile(product.each, weight.kind, weight.group, product.x.element_size(), stages(target()))
    return tile


def by_pairs(launch: Callable[..., Tensor]) -> Callable[[Product, Any], Tensor]:
    """A launch for unsorted pairs."""
    return lambda p, _: launch(p.x, p.weight, p.experts, p.bias, p.pairs, p.activation, p.weights)


def launch_pairs_of_a_token(product: Product, _cut: Any) -> Tensor:
    p = product
    return launch_pairs(p.x, p.weight, p.experts, p.bias, p.pairs, p.activation, p.weights, p.first)


def by_tiles(launch: Callable[..., Tensor]) -> Callable[[Product, Any], Tensor]:
    return lambda p, tile: launch(p.x, p.weight, p.experts, p.bias, p.pairs, p.activation, tile, p.weights)


CODES = (
    Kernel("moe/pairs_float8", pairs_of_float8, by_pairs(launch_pairs_float8)),
    Kernel("moe/pairs", pairs_of_a_token, launch_pairs_of_a_token),
    Kernel("moe/values", values, by_tiles(launch_values_product)),
    Kernel("moe/mxfp4", mxfp4, by_tiles(launch_mxfp4_product)),
    Kernel("moe/coded", coded, by_tiles(launch_coded_product)),
)
ON_A_CPU = by_tiles(coded_product_reference)


def choose(product: Product) -> tuple[Kernel, Tile | bool]:
    """The kernel that computes this product, and its cut."""
    return next((kernel, cut) for kernel in CODES if (cut := kernel.cut(product)))


def coded_product(product: Product) -> Tensor:
    """As moe/grouped's product, with codes [E * N, K], or with an activation [E * 2N, K], gate first in each expert."""
    kernel, cut = choose(product)
    return kernel.launch(product, cut) if product.x.is_cuda else ON_A_CPU(product, cut)
