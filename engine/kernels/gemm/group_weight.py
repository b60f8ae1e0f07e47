"""GroupWeight: the quantised weight of an accelerator, four or eight bits in memory.

Inputs stay as they are and codes are widened to their dtype; where the checkpoint quantises inputs to int8, integers
are multiplied by integers. How inputs are treated depends on the checkpoint alone, never on the number of rows. One row
by codes of four bits takes no matrix units (gemm/one_row). Many rows are multiplied by the widened weight, where that
took less time at the start (gemm/long_products). Users: quantised layers on an accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Inputs
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.groups import Packed, packed
from engine.kernels.gemm.long_products import LongProducts
from engine.kernels.gemm.one_row import empty_after, one_row_product, takes
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.tiles import gated_by_tiles, linear_by_tiles
from engine.kernels.gemm.weight import Weight
from engine.kernels.room import empty_rows


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeight(Weight):
    """The weight of one layer."""

    weight: Packed
    order: Tensor | None  # [in_features]: which column of x column k of the codes meets
    inputs: Inputs | None
    bias: Tensor | None  # [out_features] float32
    long: LongProducts  # of the device
    invariant: bool  # a row has the same bits in any company

    @property
    def num_bytes(self) -> int:
        extra = [tensor for tensor in (self.order, self.bias) if tensor is not None]
        return sum(tensor.nbytes for tensor in (*self.weight.tensors(), *extra))

    def dense(self) -> Tensor:
        """A copy, float32."""
        rows = self.weight.dense().float()
        return rows if self.order is None else rows[:, torch.argsort(self.order)]

    def dense_bias(self) -> Tensor | None:
        return self.bias

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """One launch, with quantised inputs, another order of columns or a weight that is widened whole one more."""
        width = len(self.weight.codes)
        rows = self._ordered(x)
        y = x.new_empty(len(rows), width) if out is None else out.view(-1, width)
        added = None
        if residual is not None:
            added = y if residual is out else residual.view(-1, width)
        if self._is_one_row(rows):
            one_row_product(rows, self.weight, self.bias, added, y)
        elif self._widens(len(rows), None):
            self.long.widened(self.weight, self.bias, x.dtype).linear(rows, y, added)
        else:
            linear_by_tiles(rows, self.weight, self.bias, added, y, self.inputs, self.invariant)
        return y.view(*x.shape[:-1], width) if out is None else out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        rows = self._ordered(x)
        if self._is_one_row(rows):
            y = rows.new_empty(1, len(self.weight.codes) // 2)
            one_row_product(rows, self.weight, self.bias, None, y, activation)
        elif self._widens(len(rows), activation):
            y = self.long.widened(self.weight, self.bias, x.dtype).gated(rows, activation)
        else:
            y = gated_by_tiles(rows, self.weight, self.bias, activation, self.inputs, self.invariant)
        return y.view(*x.shape[:-1], y.shape[1])

    def add_then_norm(self, residual: Tensor, x: Tensor, gain: Tensor, eps: float) -> Unscaled | None:
        """One row comes back prescaled."""
        rows = self._ordered(x)
        after = empty_after(residual, self.weight, gain, eps) if self._is_one_row(rows) else None
        if after is None:
            return Weight.add_then_norm(self, residual, x, gain, eps)
        one_row_product(rows, self.weight, self.bias, residual, residual, after=after)
        return after

    def of_normed(
        self, residual: Tensor, gain: Tensor, eps: float, prescaled: Unscaled | None, activation: Activation | None
    ) -> Tensor:
        if prescaled is None or self.order is not None or not self._is_one_row(prescaled.rows):
            return Weight.of_normed(self, residual, gain, eps, prescaled, activation)
        y = residual.new_empty(1, len(self.weight.codes) // (1 if activation is None else 2))
        one_row_product(prescaled.rows, self.weight, self.bias, None, y, activation, before=prescaled)
        return y

    def _is_one_row(self, rows: Tensor) -> bool:
        return not self.invariant and takes(rows, self.weight)

    def _ordered(self, x: Tensor) -> Tensor:
        """x [..., K] as rows [M, K], in the codes' order of columns."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if self.order is None:
            return rows
        return torch.index_select(rows, 1, self.order, out=empty_rows(rows, len(self.order)))

    def _widens(self, rows: int, activation: Activation | None) -> bool:
        return not self.invariant and self.inputs is None and self.long.widens(self.weight, rows, activation)


def pack_groups(codes: Codes, bias: Tensor | None, long: LongProducts, invariant: bool) -> GroupWeight:
    """From the canonical form."""
    if codes.values.is_cuda:
        arrivals(codes.values.device)  # allocated here, since a product may first run while a graph is captured
    weight = packed(codes, words=codes.inputs is None)
    return GroupWeight(weight, codes.order, codes.inputs, None if bias is None else bias.float(), long, invariant)
