"""Chooses the kernel for a product with a float weight: a table per operation, read from top to bottom.

The first kernel that takes a product computes it; the vendor's library computes the other products.

    linear, with a norm    one row: gemm/dense_row    few rows: gemm/split_k
    gated                  the same two, then up to 128 rows: gemm/gated_one_wave, more rows: gemm/gated_persistent

Layers pass tensors. The start of an accelerator passes only sizes: it needs the kernels of every number of rows,
and assumes aligned 16-bit rows. Then gemm/dense_row does not count, since it takes neither float16 nor unaligned
rows. Users: gemm/dense, gemm/long_products, the start of an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.algorithms import Kind
from engine.kernels.gemm.dense_row import RowCut, dense_row_product
from engine.kernels.gemm.descriptors import is_aligned
from engine.kernels.gemm.gated_one_wave import one_wave_product
from engine.kernels.gemm.gated_persistent import gated_product
from engine.kernels.gemm.split_k import Split, split_linear
from engine.kernels.tune import few_rows, many_gated, one_row, one_wave_gated

Cut = Split | RowCut | bool  # True: the kernel divides the product itself


class Product(NamedTuple):
    """x [rows, depth] times a weight [width, depth]; gated: times gate's and up's, each [width, depth]."""

    rows: int
    width: int
    depth: int
    gated: bool
    x: Tensor | None = None
    weight: Tensor | None = None  # None: only the sizes are known, and x is None too

    @property
    def aligned(self) -> bool:
        """Whether the rows of both operands are 16-byte aligned."""
        return self.x is None or self.weight is None or (is_aligned(self.x) and is_aligned(self.weight))


class Kernel(NamedTuple):
    """A row of a table."""

    name: str  # the kernel's file
    cut: Callable[[Product], Cut | None]  # how the kernel divides a product; falsy: not this product
    launch: Callable[..., None]  # x, weight, bias, residual, out, activation, cut; for norms also `before` and `after`


Choice = tuple[Kernel, Any]  # the kernel, and the cut for its launch


def of_one_row(product: Product) -> Cut | None:
    """The cut for one row of bfloat16, if kernels/tune has one."""
    x = product.x
    if product.rows != 1 or x is None or x.dtype is not torch.bfloat16 or not product.aligned:
        return None
    return one_row(product.width, product.depth, product.gated)


def of_few_rows(product: Product) -> Cut | None:
    """The cut for few rows, if kernels/tune has one; tiles of rows need alignment for descriptors."""
    cut = few_rows(product.rows, product.width, product.depth, product.gated)
    return None if cut is None or (cut.block_m and not product.aligned) else cut


def of_few_normed(product: Product) -> Cut | None:
    """`of_few_rows` with a norm; not for float16, because rows times the norm's gain exceed its range."""
    return None if product.x is not None and product.x.dtype is torch.float16 else of_few_rows(product)


def of_one_wave(product: Product) -> Cut | None:
    return one_wave_gated(product.rows, product.width, product.depth)


def of_many_rows(product: Product) -> Cut | None:
    return many_gated(product.rows, product.width, product.depth)


def launch_one_wave(
    x: Tensor, weight: Tensor, bias: Tensor | None, _residual: None, out: Tensor, activation: Activation, _cut: Cut
) -> None:
    one_wave_product(x, weight, bias, out, activation)


def launch_many(
    x: Tensor, weight: Tensor, bias: Tensor | None, _residual: None, out: Tensor, activation: Activation, _cut: Cut
) -> None:
    gated_product(x, weight, bias, out, activation)


LINEAR = (
    Kernel("gemm/dense_row", of_one_row, dense_row_product),
    Kernel("gemm/split_k", of_few_rows, split_linear),
)
NORMED = (  # with a norm before or after the product, gated or not
    Kernel("gemm/dense_row", of_one_row, dense_row_product),
    Kernel("gemm/split_k", of_few_normed, split_linear),
)
GATED = (  # with an activation and no norm
    Kernel("gemm/dense_row", of_one_row, dense_row_product),
    Kernel("gemm/split_k", of_few_rows, split_linear),
    Kernel("gemm/gated_one_wave", of_one_wave, launch_one_wave),
    Kernel("gemm/gated_persistent", of_many_rows, launch_many),
)


def choose(table: tuple[Kernel, ...], product: Product) -> Choice | None:
    """The kernel and its cut; None: the vendor's library multiplies. Equal choices mean equal launches."""
    if product.x is not None and product.x.dtype not in (torch.bfloat16, torch.float16):
        return None  # our kernels support only these two dtypes
    for kernel in table:
        cut = kernel.cut(product)
        if cut:
            return kernel, cut
    return None


def linear_choice(rows: int, width: int, depth: int) -> Choice | None:
    """The choice for `rows` rows times a weight [width, depth]."""
    return choose(LINEAR, Product(rows, width, depth, gated=False))


def gated_choice(rows: int, width: int, depth: int) -> Choice | None:
    """The choice for `rows` rows times gate and up, each [width, depth], without a norm."""
    return choose(GATED, Product(rows, width, depth, gated=True))


def is_vendors(kind: Kind, rows: int) -> bool:
    """Whether the vendor's library multiplies `rows` rows, without a norm."""
    if kind.gated:
        return gated_choice(rows, kind.width // 2, kind.depth) is None
    return linear_choice(rows, kind.width, kind.depth) is None
