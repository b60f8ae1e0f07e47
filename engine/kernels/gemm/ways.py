"""Which kernel multiplies by a weight of floats: a table for each operation, read from top to bottom.

The first way that takes a product has it; the vendor's library has what no way takes. A way's condition says how the
kernel cuts the product. Launches ask with the rows and the weight, the start with sizes alone: then the rows are of 16
bits, each begins at whole 16 bytes, and one row counts as any other number, since rows of float16 and unaligned ones
do not go to gemm/dense_row. Users: gemm/dense, gemm/long_products, the start of an accelerator.
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

Cut = Split | RowCut | bool  # True: the kernel cuts by itself
Choice = tuple["Way", Any]  # and the cut that its launch takes


class Way(NamedTuple):
    """A row of a table."""

    name: str  # the kernel's file
    takes: Callable[[int, int, int, bool, Tensor | None, Tensor | None], Cut | None]  # as `choose`; falsy: it does not
    launch: Callable[..., None]  # x, weight, bias, residual, out, activation, cut; before, after of a norm


def _one_row(rows: int, width: int, depth: int, gated: bool, x: Tensor | None, weight: Tensor | None) -> Cut | None:
    if rows != 1 or x is None or weight is None or x.dtype is not torch.bfloat16:
        return None
    return one_row(width, depth, gated) if is_aligned(x) and is_aligned(weight) else None


def _few_rows(rows: int, width: int, depth: int, gated: bool, x: Tensor | None, weight: Tensor | None) -> Cut | None:
    cut = few_rows(rows, width, depth, gated)
    if cut is None or not cut.block_m or x is None or weight is None:
        return cut
    return cut if is_aligned(x) and is_aligned(weight) else None


def _few_normed(rows: int, width: int, depth: int, gated: bool, x: Tensor | None, weight: Tensor | None) -> Cut | None:
    if x is not None and x.dtype is torch.float16:  # rows times a norm's gain leave its range
        return None
    return _few_rows(rows, width, depth, gated, x, weight)


def _one_wave(rows: int, width: int, depth: int, _gated: bool, _x: Tensor | None, _weight: Tensor | None) -> Cut | None:
    return one_wave_gated(rows, width, depth)


def _many(rows: int, width: int, depth: int, _gated: bool, _x: Tensor | None, _weight: Tensor | None) -> Cut | None:
    return many_gated(rows, width, depth)


def _launch_one_wave(
    x: Tensor, weight: Tensor, bias: Tensor | None, _residual: None, out: Tensor, activation: Activation, _cut: Cut
) -> None:
    one_wave_product(x, weight, bias, out, activation)


def _launch_many(
    x: Tensor, weight: Tensor, bias: Tensor | None, _residual: None, out: Tensor, activation: Activation, _cut: Cut
) -> None:
    gated_product(x, weight, bias, out, activation)


ONE_ROW = Way("gemm/dense_row", _one_row, dense_row_product)
FEW_ROWS = Way("gemm/split_k", _few_rows, split_linear)
LINEAR = (ONE_ROW, FEW_ROWS)
NORMED = (ONE_ROW, FEW_ROWS._replace(takes=_few_normed))  # with a norm before or after; gated or not
GATED = (  # with an activation, and no norm
    ONE_ROW,
    FEW_ROWS,
    Way("gemm/gated_one_wave", _one_wave, _launch_one_wave),
    Way("gemm/gated_persistent", _many, _launch_many),
)


def choose(
    ways: tuple[Way, ...], rows: int, width: int, depth: int, gated: bool, x: Tensor | None = None,
    weight: Tensor | None = None,
) -> Choice | None:  # fmt: skip
    """How x [rows, depth] meets a weight [width, depth], gated two of them; None: by the vendor's library.

    Equal choices launch one kernel, cut alike.
    """
    if x is not None and x.dtype is not torch.bfloat16 and x.dtype is not torch.float16:
        return None  # matrix units take these two as they are
    for way in ways:
        cut = way.takes(rows, width, depth, gated, x, weight)
        if cut:
            return way, cut
    return None


def is_vendors(kind: Kind, rows: int) -> bool:
    """Whether the vendor's library multiplies so many rows, where no norm is fused."""
    if kind.gated:
        return gated_way(rows, kind.width // 2, kind.depth) is None
    return choose(LINEAR, rows, kind.width, kind.depth, gated=False) is None


def gated_way(rows: int, width: int, depth: int) -> Choice | None:
    """How so many rows meet gate and up [width, depth], where no norm is fused; None: by the vendor's library."""
    return choose(GATED, rows, width, depth, gated=True)
