"""RMSNorm and LayerNorm: a weight (and a bias), kept in float32, which is exact for every checkpoint dtype.

Owner: the model; read only after loading. Towers call the objects. Decoder blocks hand on `Normed`, the residual stream
with the norm through which the next product reads it: of few rows, products do most of that norm (gemm/split_k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.pack import Placement
from engine.kernels.norm import layer_norm, rms_norm
from engine.weights.table import Wanted


class RMSNorm:
    """x / rms(x) * weight; families that keep weight - 1 in their files give an offset of 1."""

    __slots__ = ("eps", "offset", "size", "weight")

    weight: Tensor  # [size] float32

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        self.size = size
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps, out=out)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"weight": (Wanted((self.size,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        self.weight = _own(pieces["weight"][0], placement.device)
        self.weight += self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """norm(residual), not computed yet; good until the residual stream changes again."""

    norm: RMSNorm
    residual: Tensor  # [T, hidden]
    prescaled: Unscaled | None = (
        None  # its rows times the gain, not yet divided by the RMS, if the last product left them
    )

    def rows(self, out: Tensor | None = None) -> Tensor:
        return self.norm(self.residual, out)


class LayerNorm:
    """(x - mean) / std * weight + bias."""

    __slots__ = ("bias", "eps", "size", "weight")

    weight: Tensor  # [size] float32
    bias: Tensor  # [size] float32

    def __init__(self, size: int, eps: float) -> None:
        self.size = size
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"weight": (Wanted((self.size,)),), "bias": (Wanted((self.size,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        self.weight = _own(pieces["weight"][0], placement.device)
        self.bias = _own(pieces["bias"][0], placement.device)


def _own(piece: Tensor | None, device: str) -> Tensor:
    """A float32 copy that does not hold on to the mapped file."""
    assert piece is not None
    return piece.to(device, torch.float32, copy=True)
