"""Chooses the kernel for a product of FP8 codes with FP8 codes: tables, read from top to bottom.

The first kernel that takes a product computes it, and the last kernel takes every product.

    gemm/float8_few       one row, if the weight is large and has scales of blocks, on sm_90
    gemm/float8_row       one row
    gemm/float8_rows      2 to 8 rows with scales per 128 columns; the weight is small
    gemm/float8_library   the vendor's library, for the numbers of rows for which gemm/scaled found it faster
    gemm/float8_few       up to 64 rows, on sm_90
    gemm/float8           all other products; with --deterministic all products, divided equally for any number of rows

Users: gemm/float8_weight, gemm/scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from engine.kernels.gemm.float8 import float8_product, tile_of
from engine.kernels.gemm.float8_few import few_tile_of, float8_few_product, takes_alone
from engine.kernels.gemm.float8_few import takes as takes_few
from engine.kernels.gemm.float8_library import library_product, suits
from engine.kernels.gemm.float8_row import float8_row_product
from engine.kernels.gemm.float8_row import takes as takes_row
from engine.kernels.gemm.float8_rows import float8_rows_product
from engine.kernels.gemm.float8_rows import takes as takes_rows
from engine.kernels.gemm.groups import Packed
from engine.kernels.target import target

IsLibrarys = Callable[[int, int, int], bool]  # rows, width, depth


class Product(NamedTuple):
    """x [M, K] and its scales times the weight [N, K] of codes."""

    x: Tensor
    scales: Tensor
    weight: Packed
    bias: Tensor | None = None  # [N] float32
    narrow: Tensor | None = None  # the bias in the activations' dtype, for the library
    is_librarys: IsLibrarys | None = None

    @property
    def sides(self) -> tuple[int, int, int]:
        """Rows, width, depth."""
        return len(self.x), len(self.weight.codes), self.weight.depth


class Kernel(NamedTuple):
    """A row of a table."""

    name: str  # the kernel's file
    takes: Callable[[Product], bool]
    launch: Callable[[Product, Tensor | None, Tensor], None]  # residual [M, N], may be out; out [M, N]


def by_row(product: Product, residual: Tensor | None, out: Tensor) -> None:
    float8_row_product(product.x, product.scales, product.weight, product.bias, residual, out)


def by_rows(product: Product, residual: Tensor | None, out: Tensor) -> None:
    float8_rows_product(product.x, product.scales, product.weight, product.bias, residual, out)


def is_librarys(product: Product) -> bool:
    return product.is_librarys is not None and suits(product.weight) and product.is_librarys(*product.sides)


def by_library(product: Product, residual: Tensor | None, out: Tensor) -> None:
    library_product(product.x, product.scales, product.weight, product.narrow, residual, out)


def by_few(product: Product, residual: Tensor | None, out: Tensor) -> None:
    x, scales, weight, bias, *_ = product
    float8_few_product(x, scales, weight, bias, residual, out, few_tile_of(*product.sides))


def by_tiles(product: Product, residual: Tensor | None, out: Tensor) -> None:
    rows, width, depth = product.sides
    x, scales, weight, bias, *_ = product
    float8_product(x, scales, weight, bias, residual, out, tile_of(rows, width, depth, _stages()))


def by_one_tile(product: Product, residual: Tensor | None, out: Tensor) -> None:
    """A product that is divided equally for any number of rows."""
    _, width, depth = product.sides
    x, scales, weight, bias, *_ = product
    float8_product(x, scales, weight, bias, residual, out, tile_of(None, width, depth, _stages()))


def _stages() -> int:
    return 3 if target().loads_past_registers else 2


ALONE = Kernel("gemm/float8_few", lambda p: takes_alone(p.x, p.weight), by_few)
ROW = Kernel("gemm/float8_row", lambda p: takes_row(p.x, p.weight), by_row)
ROWS = Kernel("gemm/float8_rows", lambda p: takes_rows(p.x, p.weight), by_rows)
LIBRARY = Kernel("gemm/float8_library", is_librarys, by_library)
FEW = Kernel("gemm/float8_few", lambda p: takes_few(p.x, p.weight), by_few)
TILES = Kernel("gemm/float8", lambda _: True, by_tiles)

FLOAT8 = (ALONE, ROW, ROWS, LIBRARY, FEW, TILES)
OWN = (FEW, TILES)  # our own kernels, which gemm/scaled compares with the library
INVARIANT = (TILES._replace(launch=by_one_tile),)


def choose(table: tuple[Kernel, ...], product: Product) -> Kernel:
    """The kernel that computes this product."""
    return next(kernel for kernel in table if kernel.takes(product))


def own_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    """`float8_product` by our own kernel for this number of rows."""
    product = Product(x, x_scales, weight, bias)
    choose(OWN, product).launch(product, residual, out)
