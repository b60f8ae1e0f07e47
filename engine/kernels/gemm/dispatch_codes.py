"""Chooses the kernel for a product with a quantised weight, with float or int8 inputs: tables, read top to bottom.

The first kernel that takes a product computes it, and the last kernel takes every product.

    gemm/one_row          one row of bfloat16 with 4-bit codes; the only kernel that fuses a norm
    gemm/widen_weight     many rows, if gemm/long_products found it faster: widens the weight to floats, then gemm/dense
    gemm/scaled_values    rows of bfloat16 with 4-bit codes on sm_90
    gemm/groups           all other products; with --deterministic all products, because a row's bits never depend on
                          other rows

Users: gemm/group_weight, gemm/long_products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.groups import Packed, groups_product, tile_for
from engine.kernels.gemm.one_row import one_row_product
from engine.kernels.gemm.one_row import takes as takes_row
from engine.kernels.gemm.quantise_rows import quantise_rows
from engine.kernels.gemm.scaled_values import scaled_values_product
from engine.kernels.gemm.scaled_values import takes as takes_values
from engine.kernels.gemm.value_cuts import cut_for
from engine.kernels.gemm.weight import Weight
from engine.kernels.room import empty_rows


class Widening(Protocol):
    """The interface of gemm/long_products: whether to widen a weight completely, and the widened weight."""

    def widens(self, weight: Packed, rows: int, activation: Activation | None) -> bool: ...

    def widened(self, weight: Packed, bias: Tensor | None, dtype: torch.dtype) -> Weight: ...


class Product(NamedTuple):
    """x [M, K] with contiguous rows times the weight [N, K]; with an activation gate's rows come first."""

    x: Tensor
    weight: Packed
    bias: Tensor | None = None  # [N] float32
    activation: Activation | None = None
    inputs: Inputs | None = None  # x becomes int8 first
    long: Widening | None = None
    invariant: bool = False  # a row's bits must not depend on other rows


class Kernel(NamedTuple):
    """A row of a table."""

    name: str  # the kernel's file
    takes: Callable[[Product], bool]
    linear: Callable[[Product, Tensor | None, Tensor], None]  # residual [M, N], may be out; out [M, N]
    gated: Callable[[Product, Activation], Tensor]  # [M, N / 2], new


def linear_of_one_row(product: Product, residual: Tensor | None, out: Tensor) -> None:
    one_row_product(product.x, product.weight, product.bias, residual, out)


def gated_of_one_row(product: Product, activation: Activation) -> Tensor:
    out = product.x.new_empty(1, len(product.weight.codes) // 2)
    one_row_product(product.x, product.weight, product.bias, None, out, activation)
    return out


def is_widened(product: Product) -> bool:
    if product.inputs is not None or product.long is None:
        return False
    return product.long.widens(product.weight, len(product.x), product.activation)


def in_floats(product: Product) -> Weight:
    assert product.long is not None
    return product.long.widened(product.weight, product.bias, product.x.dtype)


def linear_of_floats(product: Product, residual: Tensor | None, out: Tensor) -> None:
    in_floats(product).linear(product.x, out, residual)


def gated_of_floats(product: Product, activation: Activation) -> Tensor:
    return in_floats(product).gated(product.x, activation)


def linear_by_values(product: Product, residual: Tensor | None, out: Tensor) -> None:
    x, weight = product.x, product.weight
    scaled_values_product(x, weight, product.bias, residual, out, None, cut_for(x, weight, gated=False))


def gated_by_values(product: Product, activation: Activation) -> Tensor:
    x, weight = product.x, product.weight
    out = empty_rows(x, len(weight.codes) // 2)
    scaled_values_product(x, weight, product.bias, None, out, activation, cut_for(x, weight, gated=True))
    return out


def linear_by_groups(product: Product, residual: Tensor | None, out: Tensor) -> None:
    x, weight, scales = product.x, product.weight, None
    if product.inputs is not None:
        x, scales = quantise_rows(x, product.inputs.scale)
    groups_product(x, weight, product.bias, residual, out, scales, tile_for(x, weight, product.invariant))


def gated_by_groups(product: Product, activation: Activation) -> Tensor:
    both = product.x.new_empty(len(product.x), len(product.weight.codes))
    linear_by_groups(product, None, both)
    return glu(both, activation)


ONE_ROW = Kernel("gemm/one_row", lambda p: takes_row(p.x, p.weight), linear_of_one_row, gated_of_one_row)
WHOLE = Kernel("gemm/widen_weight", is_widened, linear_of_floats, gated_of_floats)
VALUES = Kernel("gemm/scaled_values", lambda p: takes_values(p.x, p.weight), linear_by_values, gated_by_values)
GROUPS = Kernel("gemm/groups", lambda _: True, linear_by_groups, gated_by_groups)

CODES = (ONE_ROW, WHOLE, VALUES, GROUPS)
TILES = (VALUES, GROUPS)  # kernels that widen codes tile by tile in registers: the alternatives to WHOLE
INVARIANT = (GROUPS,)


def choose(table: tuple[Kernel, ...], product: Product) -> Kernel:
    """The kernel that computes this product."""
    return next(kernel for kernel in table if kernel.takes(product))


def table_of(invariant: bool) -> tuple[Kernel, ...]:
    return INVARIANT if invariant else CODES


def linear_by_tiles(x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """x [M, K] with contiguous rows times the weight [N, K] into out [M, N]; bias [N]; residual [M, N], may be out."""
    product = Product(x, weight, bias)
    choose(TILES, product).linear(product, residual, out)


def gated_by_tiles(x: Tensor, weight: Packed, bias: Tensor | None, activation: Activation) -> Tensor:
    """activate(gate, up) of x [M, K] times the weight [2N, K], gate's rows first: [M, N], new; bias [2N]."""
    product = Product(x, weight, bias, activation)
    return choose(TILES, product).gated(product, activation)
