"""Chooses the kernel for products of pairs with FP8 experts and FP8 inputs: a table, read from top to bottom.

    moe/pairs_float8   few unsorted pairs; quantises x if it is not quantised yet
    moe/float8         sorted pairs

Users: moe/float8_weight, which sorts pairs for devices and weights that the first kernel does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.groups import Packed
from engine.kernels.gemm.quantise_floats import CodedRows, quantise_floats
from engine.kernels.moe.float8 import float8_experts_product, float8_tile
from engine.kernels.moe.grouped import Tile
from engine.kernels.moe.pairs_float8 import launch_pairs_float8
from engine.kernels.moe.sort import Pairs
from engine.kernels.moe.tiles import Shape, count_of, tile_for
from engine.kernels.target import target


class Product(NamedTuple):
    """Each pair's row of x times the weight [E * N, K] of the pair's expert; arguments as in moe/float8."""

    x: Tensor | CodedRows
    weight: Packed
    experts: int
    bias: Tensor | None
    pairs: Pairs
    activation: Activation | None
    inputs: Inputs  # how x is quantised
    dtype: torch.dtype  # the result's dtype
    weights: Tensor | None = None
    then: Inputs | None = None  # how the next product quantises the result, which the kernel does if possible
    invariant: bool = False  # a row's bits do not depend on other rows: one tile for any number of pairs


class Kernel(NamedTuple):
    """A row of a table."""

    name: str  # the kernel's file
    takes: Callable[[Product], bool]
    launch: Callable[[Product], Tensor | CodedRows]


def by_pairs(product: Product) -> Tensor | CodedRows:
    x, weight, experts, bias, pairs, activation, inputs, dtype, weights, *_ = product
    return launch_pairs_float8(x, weight, experts, bias, pairs, activation, weights, None, inputs, dtype)


def by_tiles(product: Product) -> Tensor | CodedRows:
    x, weight, experts, bias, pairs, activation, inputs, dtype, weights, then, _ = product
    codes = quantise_floats(x, inputs) if isinstance(x, Tensor) else x
    tile = tile_of(product)
    return float8_experts_product(codes, weight, experts, bias, pairs, activation, tile, dtype, weights, then)


def tile_of(product: Product) -> Tile:
    experts, depth, gated = product.experts, product.weight.depth, product.activation is not None
    each = count_of(product.pairs, experts, product.invariant) / experts
    width = len(product.weight.codes) // experts // (2 if gated else 1)
    shape = Shape(experts, width, depth, gated)
    tile = tile_for("E4M3 by E4M3", shape, each, partial(float8_tile, target(), each, gated))
    return tile._replace(least=0) if product.invariant else tile


FLOAT8 = (
    Kernel("moe/pairs_float8", lambda p: p.pairs.order is None, by_pairs),
    Kernel("moe/float8", lambda _: True, by_tiles),
)


def choose(product: Product) -> Kernel:
    """The kernel that computes this product."""
    return next(kernel for kernel in FLOAT8 if kernel.takes(product))
