"""Weights of an accelerator, as they are saved: y = x W^T + bias by the vendor's library, or by kernels of ours.

The matrix stays as it is, in the activations' dtype. The vendor's library multiplies by the algorithm that
gemm/algorithms found. Where kernels/tune says so, one row goes to gemm/dense_row, few rows go to gemm/split_k, and
gated products of more rows to gemm/gated_one_wave or gemm/gated_persistent.
Users: every layer with weights, on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.algorithms import Algorithms, Kind
from engine.kernels.gemm.dense_row import RowCut, dense_row_product
from engine.kernels.gemm.descriptors import is_aligned
from engine.kernels.gemm.epilogue import Unscaled, empty_unscaled
from engine.kernels.gemm.gated_one_wave import one_wave_product
from engine.kernels.gemm.gated_persistent import gated_product
from engine.kernels.gemm.split_k import Split, split_linear
from engine.kernels.gemm.weight import Weight, rows_of
from engine.kernels.room import empty_rows
from engine.kernels.tune import few_rows, many_gated, one_row, one_wave_gated

GatedProduct = Callable[[Tensor, Tensor, Tensor | None, Tensor, Activation], None]  # x, weight, bias, out


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight(Weight):
    """The weight of one layer."""

    weight: Tensor  # [out_features, in_features], contiguous
    bias: Tensor | None  # [out_features] of the weight's dtype
    algorithms: Algorithms  # of the device

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def sums_in_two(self) -> bool:
        return self.bias is not None

    def dense(self) -> Tensor:
        return self.weight

    def dense_bias(self) -> Tensor | None:
        return self.bias

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """One launch, except where the vendor's library multiplies and there are both a residual and a bias."""
        rows, width = rows_of(x, self.weight), len(self.weight)
        y = rows.new_empty(len(rows), width) if out is None else out.view(-1, width)
        added = None
        if residual is not None:  # one and the same tensor as y spares the vendor's library a copy before the product
            added = y if residual is out else residual.view(-1, width)
        self._multiply(rows, added, y, gated=False)
        return y.view(*x.shape[:-1], width) if out is None else out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """One launch where kernels/tune has a kernel for these rows, else two."""
        rows, width = rows_of(x, self.weight), len(self.weight) // 2
        self._record(False, gated=True)
        product = self._gated_product(rows)
        if product is None:
            both = rows.new_empty(len(rows), 2 * width)
            self._multiply(rows, None, both, gated=True)
            y = glu(both, activation)
        else:
            y = rows.new_empty(len(rows), width)
            product(rows, self.weight, self.bias, y, activation)
        return y.view(*x.shape[:-1], width)

    def add_then_norm(self, residual: Tensor, x: Tensor, gain: Tensor, eps: float) -> Unscaled | None:
        """Few rows come back prescaled."""
        cut = self._row_cut(x, gated=False) or self._cut(x, gated=False, normed=True)
        after = None if cut is None else empty_unscaled(residual, cut.block_n, gain, eps)
        if cut is None or after is None:
            return Weight.add_then_norm(self, residual, x, gain, eps)
        multiply(rows_of(x, self.weight), self.weight, self.bias, residual, residual, None, cut, after=after)
        return after

    def of_normed(
        self, residual: Tensor, gain: Tensor, eps: float, prescaled: Unscaled | None, activation: Activation | None
    ) -> Tensor:
        gated = activation is not None
        cut = None
        if prescaled is not None:
            cut = self._row_cut(residual, gated) or self._cut(residual, gated, normed=True)
        if cut is None or prescaled is None:
            return Weight.of_normed(self, residual, gain, eps, prescaled, activation)
        if gated:  # a product reads the result next
            y = empty_rows(residual, len(self.weight) // 2)
        else:
            y = residual.new_empty(len(residual), len(self.weight))
        multiply(prescaled.rows, self.weight, self.bias, None, y, activation, cut, before=prescaled)
        return y

    def _multiply(self, rows: Tensor, added: Tensor | None, y: Tensor, gated: bool) -> None:
        """y = rows W^T + bias (+ added); `gated`: its halves become gate and up."""
        weight, bias = self.weight, self.bias
        self._record(added is not None, gated)
        cut = self._row_cut(rows, gated=False) or self._cut(rows, gated=False)
        if cut is not None:
            multiply(rows, weight, bias, added, y, None, cut)
        elif bias is None and self.algorithms.run_chosen(rows, weight, gated, added, y):
            pass  # launched
        elif added is not None:
            torch.addmm(added, rows, weight.t(), out=y)
            if bias is not None:
                y += bias
        elif bias is not None:
            torch.addmm(bias, rows, weight.t(), out=y)
        else:
            torch.mm(rows, weight.t(), out=y)

    def _record(self, added: bool, gated: bool) -> None:
        if self.bias is None:  # with a bias torch asks the library for a product that adds the bias
            self.algorithms.record(self.weight, added, gated)

    def _cut(self, rows: Tensor, gated: bool, normed: bool = False) -> Split | None:
        """How gemm/split_k multiplies these rows [M, K], if it does; `normed`: with a norm before or after."""
        if not _on_matrix_units(rows) or (normed and rows.dtype is torch.float16):  # a norm's gain leaves its range
            return None
        width, depth = self.weight.shape
        cut = few_rows(len(rows), width // (1 + gated), depth, gated)
        return cut if cut is not None and self._can_load(cut, rows) else None

    def _row_cut(self, rows: Tensor, gated: bool) -> RowCut | None:
        """How gemm/dense_row multiplies these rows [M, K], if it does."""
        width, depth = self.weight.shape
        if len(rows) != 1 or rows.dtype is not torch.bfloat16 or not is_aligned(rows) or not is_aligned(self.weight):
            return None
        return one_row(width // (1 + gated), depth, gated)

    def _can_load(self, cut: Split, rows: Tensor) -> bool:
        return not cut.block_m or (is_aligned(rows) and is_aligned(self.weight))

    def _gated_product(self, rows: Tensor) -> GatedProduct | None:
        """What launches one kernel for the gated product of these rows [M, K], where there is a `gated_way`."""
        width, depth = self.weight.shape
        way: Split | RowCut | GatedProduct | None = self._row_cut(rows, gated=True)
        if way is None and _on_matrix_units(rows):
            way = gated_way(len(rows), width // 2, depth)
        if not isinstance(way, Split | RowCut):
            return way
        if isinstance(way, Split) and not self._can_load(way, rows):
            return None
        return lambda x, weight, bias, out, activation: multiply(x, weight, bias, None, out, activation, way)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: Activation | None, cut: Split | RowCut, before: Unscaled | None = None, after: Unscaled | None = None,
) -> None:  # fmt: skip
    """The product by whose cut this is; arguments as of both."""
    if isinstance(cut, RowCut):
        dense_row_product(x, weight, bias, residual, out, activation, cut, before, after)
    else:
        split_linear(x, weight, bias, residual, out, activation, cut, before, after)


def gated_way(rows: int, width: int, depth: int) -> Split | GatedProduct | None:
    """How `DenseWeight.gated` multiplies so many rows by weights [width, depth], where no norm is fused.

    Equal values name the same kernel: a cut for gemm/split_k, or a launcher; None: the vendor's library.
    """
    cut = few_rows(rows, width, depth, True)
    if cut is not None:
        return cut
    if one_wave_gated(rows, width, depth):
        return one_wave_product
    return gated_product if many_gated(rows, width, depth) else None


def is_vendors(kind: Kind, rows: int) -> bool:
    """Whether the vendor's library multiplies so many rows, where no norm is fused."""
    if kind.gated:
        return not gated_way(rows, kind.width // 2, kind.depth)
    return few_rows(rows, kind.width, kind.depth, False) is None


def _on_matrix_units(rows: Tensor) -> bool:
    """Whether a kernel of ours may multiply these rows: matrix units take bfloat16 and float16 as they are."""
    return rows.dtype in (torch.bfloat16, torch.float16)
