"""PartsWeight: stacked matrices of different forms; each is multiplied separately, into its own columns.

One prescaled row of FP8 codes and floats (qkv | z, then b | a of a delta rule) is multiplied in one launch.

Users: joined layers (q|k|v, gate|up) whose checkpoint stores the pieces in different forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.dense import DenseWeight
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.float8_weight import Float8Weight
from engine.kernels.gemm.weight import Weight


@dataclass(frozen=True, slots=True, eq=False)
class PartsWeight(Weight):
    """The weight of one layer."""

    parts: tuple[Weight, ...]  # the stacked matrices, in order
    widths: tuple[int, ...]  # their rows
    bias: Tensor | None  # [out_features] float32

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    def dense(self) -> Tensor:
        """A copy, float32."""
        return torch.cat([part.dense().float() for part in self.parts])

    def dense_bias(self) -> Tensor | None:
        return self.bias

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if x.numel() == x.shape[-1]:  # the parts of one row are contiguous in the result
            y = x.new_empty(*x.shape[:-1], sum(self.widths))
            for part, place in zip(self.parts, y.split(self.widths, -1), strict=True):
                part.linear(x, place)
        else:
            y = torch.cat([part.linear(x) for part in self.parts], dim=-1)
        if self.bias is not None:
            y = (y + self.bias).to(x.dtype)
        if residual is not None:
            y += residual
        return y if out is None else out.copy_(y)

    def of_normed(
        self, residual: Tensor, gain: Tensor, eps: float, prescaled: Unscaled | None, activation: Activation | None
    ) -> Tensor:
        codes, *others = self.parts
        if activation is None and self.bias is None and isinstance(codes, Float8Weight) and len(others) == 1:
            floats = others[0]
            y = codes.of_normed_and(floats.weight, prescaled) if isinstance(floats, DenseWeight) else None
            if y is not None:
                return y
        return Weight.of_normed(self, residual, gain, eps, prescaled, activation)
