"""Linear: one Weight made of one or more checkpoint matrices stacked by rows (q|k|v, gate|up).

Owner: the model; read only after loading. In: [..., in_features]. Out: [..., sum of out_features], same dtype.
Convolutions whose stride equals their kernel, or whose input is unrolled first, are linear layers too: `fold` names
the trailing dimensions that the checkpoint keeps apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.pack import Placement, pack, pack_gated, stacked
from engine.kernels.gemm.weight import Weight
from engine.layers.norm import Normed, RMSNorm
from engine.weights.table import Shape


class Linear:
    """y = x W^T + b."""

    __slots__ = ("biases", "fold", "in_features", "out_features", "weight")

    weight: Weight

    def __init__(
        self,
        in_features: int,
        *out_features: int,
        bias: bool | tuple[bool, ...] = False,
        fold: Shape = (),
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features  # rows of each joined piece
        self.biases = bias if isinstance(bias, tuple) else (bias,) * len(out_features)
        self.fold = fold or (in_features,)
        assert torch.Size(self.fold).numel() == in_features

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.linear(x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += x W^T + b, in place, in the same pass."""
        self.weight.linear(x, residual, residual)

    def of_normed(self, normed: Normed) -> Tensor:
        """The same of norm(residual)."""
        norm = normed.norm
        return self.weight.of_normed(normed.residual, norm.weight, norm.eps, normed.prescaled, None)

    def add_then(self, norm: RMSNorm, residual: Tensor, x: Tensor) -> Normed:
        """`add_to`, where the stream's next reader is a product of norm(residual)."""
        return Normed(norm, residual, self.weight.add_then_norm(residual, x, norm.weight, norm.eps))

    def expects(self) -> dict[str, tuple[Shape | None, ...]]:
        shapes: dict[str, tuple[Shape | None, ...]] = {
            "weight": tuple((rows, *self.fold) for rows in self.out_features)
        }
        if any(self.biases):
            shapes["bias"] = tuple((rows,) if has else None for rows, has in zip(self.out_features, self.biases))
        return shapes

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        device = placement.device
        weights = [
            piece.to(device, weight_dtype(piece.dtype, placement)).reshape(-1, self.in_features)
            for piece in pieces["weight"]
            if piece is not None
        ]
        weight = stacked(weights)  # [sum of out_features, in_features]
        bias = None
        if any(self.biases):
            parts = [
                torch.zeros(rows, device=device) if piece is None else piece.to(device, torch.float32)
                for rows, piece in zip(self.out_features, pieces["bias"])
            ]
            bias = torch.cat(parts)  # a piece without a bias adds zero
        self.weight = pack(weight, bias, placement)


class GatedLinear(Linear):
    """activate(x G^T + g, x U^T + u): gate and up of a gated MLP, in one pass where the weight's form has one."""

    __slots__ = ("activation",)

    def __init__(self, in_features: int, width: int, bias: bool, activation: Activation) -> None:
        super().__init__(in_features, width, width, bias=bias)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.gated(x, self.activation)

    def of_normed(self, normed: Normed) -> Tensor:
        norm = normed.norm
        return self.weight.of_normed(normed.residual, norm.weight, norm.eps, normed.prescaled, self.activation)

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        gate, up = pieces["weight"]
        if any(self.biases) or gate is None or up is None:
            super().fill(pieces, placement)
        else:
            kinds = (weight_dtype(piece.dtype, placement) for piece in (gate, up))
            gate, up = (piece.to(placement.device, kind) for piece, kind in zip((gate, up), kinds))
            self.weight = pack_gated(gate, up, placement)


def weight_dtype(saved: torch.dtype, placement: Placement) -> torch.dtype:
    """How a matrix is kept: in the activations' dtype on an accelerator, whose libraries multiply like by like.

    On a CPU bfloat16 stays bfloat16 (kernels widen it exactly) and others take the activations' dtype.
    """
    return saved if saved == torch.bfloat16 and placement.device == "cpu" else placement.dtype
