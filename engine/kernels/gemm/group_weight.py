"""GroupWeight: a quantised weight of an accelerator, with 4-bit or 8-bit codes in memory.

Inputs are not quantised, and codes are widened to the inputs' dtype; if the checkpoint quantises inputs to int8,
integers are multiplied with integers. The treatment of inputs depends only on the checkpoint, never on the number of
rows. gemm/dispatch_codes chooses the kernel. Users: quantised layers on an accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Inputs
from engine.kernels.gemm.dispatch_codes import ONE_ROW, Product, choose, table_of
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.groups import Packed, packed
from engine.kernels.gemm.long_products import LongProducts
from engine.kernels.gemm.one_row import empty_after, one_row_product
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.weight import Weight
from engine.kernels.room import empty_rows


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeight(Weight):
    """The weight of one layer."""

    weight: Packed
    order: Tensor | None  # [in_features]: the column of x for column k of the codes
    inputs: Inputs | None
    bias: Tensor | None  # [out_features] float32
    long: LongProducts  # the device's long products
    invariant: bool  # a row's bits do not depend on other rows

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
        """One launch, plus one for quantised inputs, for a different order of columns, or for widening the weight."""
        width = len(self.weight.codes)
        rows = self._ordered(x)
        y = x.new_empty(len(rows), width) if out is None else out.view(-1, width)
        added = None
        if residual is not None:
            added = y if residual is out else residual.view(-1, width)
        product = self._product(rows, None)
        choose(table_of(self.invariant), product).linear(product, added, y)
        return y.view(*x.shape[:-1], width) if out is None else out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        product = self._product(self._ordered(x), activation)
        y = choose(table_of(self.invariant), product).gated(product, activation)
        return y.view(*x.shape[:-1], y.shape[1])

    def add_then_norm(self, residual: Tensor, x: Tensor, gain: Tensor, eps: float) -> Unscaled | None:
        """Returns prescaled rows if there is only one row."""
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

    def _product(self, rows: Tensor, activation: Activation | None) -> Product:
        return Product(rows, self.weight, self.bias, activation, self.inputs, self.long, self.invariant)

    def _is_one_row(self, rows: Tensor) -> bool:
        """Whether gemm/one_row, which fuses norms, takes these rows."""
        return not self.invariant and ONE_ROW.takes(self._product(rows, None))

    def _ordered(self, x: Tensor) -> Tensor:
        """x [..., K] as rows [M, K], in the codes' order of columns."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if self.order is None:
            return rows
        return torch.index_select(rows, 1, self.order, out=empty_rows(rows, len(self.order)))


def pack_groups(codes: Codes, bias: Tensor | None, long: LongProducts, invariant: bool) -> GroupWeight:
    """Makes the weight from canonical codes."""
    if codes.values.is_cuda:
        arrivals(codes.values.device)  # allocated here, since a product may first run while a graph is captured
    weight = packed(codes, words=codes.inputs is None)
    return GroupWeight(weight, codes.order, codes.inputs, None if bias is None else bias.float(), long, invariant)
