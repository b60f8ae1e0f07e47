"""Merged: matrices to which the loader adds the product of an adapter (LoRA) that the checkpoint keeps beside them.

Owner: the thread that builds the model. In: a matrix, and the adapter's two. Out: the Weight of matrix + scale * B A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.weight import Weight
from engine.quant.base import UNQUANTISED, Arrange, Expected, Tensors
from engine.weights.table import Shape, Wanted


@dataclass(frozen=True, slots=True)
class Merged:
    """The scheme of a layer of a single piece."""

    adapter: str  # its name in the checkpoint
    rank: int  # 0: the adapter is left out
    scale: float
    base: str = "base_layer.weight"

    def expects(self, out_features: Shape, fold: Shape) -> Expected:
        (rows,) = out_features
        wanted: Expected = {self.base: (Wanted((rows, *fold)),)}
        if self.rank:
            wanted[self._half("A")] = (Wanted((self.rank, *fold)),)
            wanted[self._half("B")] = (Wanted((rows, self.rank)),)
        return wanted

    def weight(
        self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool, arrange: Arrange | None
    ) -> Weight:
        (base,) = tensors[self.base]
        assert base is not None
        if self.rank:
            a, b, wide = (
                piece.to(placement.device, torch.float32)
                for kind in (self._half("A"), self._half("B"), self.base)
                for piece in tensors[kind]
                if piece is not None
            )
            base = torch.addmm(wide, b, a, alpha=self.scale).to(base.dtype)
        return UNQUANTISED.weight({"weight": [base]}, bias, placement, gated, arrange)

    def _half(self, name: str) -> str:
        return f"lora_{name}.{self.adapter}.weight"
