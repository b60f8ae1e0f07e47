"""Scheme: how the weight of a linear layer is stored, and which Weight it becomes.

Owner: the thread that builds the model. In: the tensors of a checkpoint, piece by piece. Out: a Weight. Layers, models
and steps know a Weight only.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.gemm.pack import Placement, pack, pack_gated, stacked
from engine.kernels.gemm.weight import Weight
from engine.weights.table import Shape, Wanted

Tensors = dict[str, list[Tensor]]  # tensor kind -> of each joined piece, in order


class Scheme(Protocol):
    """One way to store matrices."""

    def wants(self, rows: int, fold: Shape) -> dict[str, Wanted]:
        """Tensor kind -> what one piece [rows, *fold] is stored as; "bias" is the layer's own."""

    def weight(self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool) -> Weight:
        """The pieces, one below the other, with their bias [rows] float32; `gated`: the pieces are gate and up."""


class Unquantised:
    """Matrices of floats, under "weight"."""

    def wants(self, rows: int, fold: Shape) -> dict[str, Wanted]:
        return {"weight": Wanted((rows, *fold))}

    def weight(self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool) -> Weight:
        matrices = [
            piece.to(placement.device, weight_dtype(piece.dtype, placement)).flatten(1) for piece in tensors["weight"]
        ]
        if gated and bias is None:
            gate, up = matrices if len(matrices) == 2 else matrices[0].chunk(2)
            return pack_gated(gate, up, placement)
        return pack(stacked(matrices), bias, placement)


UNQUANTISED = Unquantised()


def weight_dtype(saved: torch.dtype, placement: Placement) -> torch.dtype:
    """How a matrix is kept: in the activations' dtype on an accelerator, whose libraries multiply like by like.

    On a CPU bfloat16 stays bfloat16 (kernels widen it exactly) and others take the activations' dtype.
    """
    return saved if saved == torch.bfloat16 and placement.device == "cpu" else placement.dtype
