"""PartsWeight: stacked matrices of different forms; each is multiplied separately, into its own columns.

Users: joined layers (q|k|v, gate|up) whose checkpoint stores the pieces in different forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
