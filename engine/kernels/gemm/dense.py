"""Float weights of an accelerator: y = x W^T + bias by the vendor's library or by our kernels.

The matrix has the checkpoint's layout, in the activations' dtype. The tables of gemm/dispatch choose our kernel; the
vendor's library computes the other products, with the algorithm that gemm/algorithms found.
Users: every layer with float weights, on an accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.algorithms import Algorithms
from engine.kernels.gemm.dispatch import GATED, LINEAR, NORMED, Choice, Kernel, Product, choose
from engine.kernels.gemm.epilogue import Unscaled, empty_unscaled
from engine.kernels.gemm.weight import Weight, rows_of
from engine.kernels.room import empty_rows


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight(Weight):
    """The weight of one layer."""

    weight: Tensor  # [out_features, in_features], contiguous
    bias: Tensor | None  # [out_features] of the weight's dtype
    algorithms: Algorithms  # the device's algorithms

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
        """One launch, except if the vendor's library multiplies and there are both a residual and a bias."""
        rows, width = rows_of(x, self.weight), len(self.weight)
        y = rows.new_empty(len(rows), width) if out is None else out.view(-1, width)
        added = None
        if residual is not None:  # passing y itself saves the vendor's library a copy before the product
            added = y if residual is out else residual.view(-1, width)
        self._multiply(rows, added, y, gated=False)
        return y.view(*x.shape[:-1], width) if out is None else out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """One launch if kernels/tune has a kernel for these rows, else two."""
        rows, width = rows_of(x, self.weight), len(self.weight) // 2
        self._record(False, gated=True)
        choice = self._choice(GATED, rows, gated=True)
        if choice is None:
            both = rows.new_empty(len(rows), 2 * width)
            self._multiply(rows, None, both, gated=True)
            y = glu(both, activation)
        else:
            y = rows.new_empty(len(rows), width)
            kernel, cut = choice
            kernel.launch(rows, self.weight, self.bias, None, y, activation, cut)
        return y.view(*x.shape[:-1], width)

    def add_then_norm(self, residual: Tensor, x: Tensor, gain: Tensor, eps: float) -> Unscaled | None:
        """Returns prescaled rows if there are few rows."""
        choice = self._choice(NORMED, x, gated=False)
        if choice is None:
            return Weight.add_then_norm(self, residual, x, gain, eps)
        kernel, cut = choice
        after = empty_unscaled(residual, cut.block_n, gain, eps)
        if after is None:
            return Weight.add_then_norm(self, residual, x, gain, eps)
        kernel.launch(rows_of(x, self.weight), self.weight, self.bias, residual, residual, None, cut, after=after)
        return after

    def of_normed(
        self, residual: Tensor, gain: Tensor, eps: float, prescaled: Unscaled | None, activation: Activation | None
    ) -> Tensor:
        gated = activation is not None
        choice = None if prescaled is None else self._choice(NORMED, residual, gated)
        if choice is None or prescaled is None:
            return Weight.of_normed(self, residual, gain, eps, prescaled, activation)
        if gated:  # a linear layer reads the result next
            y = empty_rows(residual, len(self.weight) // 2)
        else:
            y = residual.new_empty(len(residual), len(self.weight))
        kernel, cut = choice
        kernel.launch(prescaled.rows, self.weight, self.bias, None, y, activation, cut, before=prescaled)
        return y

    def _multiply(self, rows: Tensor, added: Tensor | None, y: Tensor, gated: bool) -> None:
        """y = rows W^T + bias (+ added); `gated`: y holds gate and up."""
        weight, bias = self.weight, self.bias
        self._record(added is not None, gated)
        choice = self._choice(LINEAR, rows, gated=False)
        if choice is not None:
            kernel, cut = choice
            kernel.launch(rows, weight, bias, added, y, None, cut)
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

    def _choice(self, table: tuple[Kernel, ...], rows: Tensor, gated: bool) -> Choice | None:
        """The kernel for these rows [M, K] and its cut; None: the vendor's library multiplies."""
        width, depth = self.weight.shape
        return choose(table, Product(len(rows), width // (1 + gated), depth, gated, rows, self.weight))
