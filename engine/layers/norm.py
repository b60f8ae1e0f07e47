"""RMSNorm and LayerNorm: a weight (and a bias), stored in float32, which is exact for every checkpoint dtype.

Owner: the model; read only after loading. Towers call the objects. Decoder layers pass `Normed`, the residual stream
with the norm that the next linear layer applies: with few rows, linear kernels fuse most of the norm (gemm/split_k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.base.dealing import Axis
from engine.base.model_config import TextConfig
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.pack import Placement
from engine.kernels.norm import layer_norm, rms_norm
from engine.weights.table import Wanted


class RMSNorm:
    """x / rms(x) * weight; offset: 1 for families whose files store weight - 1."""

    __slots__ = ("eps", "offset", "rows", "size", "weight")

    weight: Tensor  # [size] float32
    rows: tuple[Axis, ...] | None  # how ranks share the weight; None: every rank has all of it

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        self.size = size
        self.eps = eps
        self.offset = offset
        self.rows = None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps, out=out)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"weight": (Wanted((self.size,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        self.weight = _own(pieces["weight"][0], placement.device)
        self.weight += self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """norm(residual), not computed yet; valid until the residual stream changes."""

    norm: Norm | None  # None: the residual stream itself
    residual: Tensor  # [T, hidden]
    prescaled: Unscaled | None = (
        None  # rows times the gain, not yet divided by the RMS, if the previous linear kernel wrote them
    )

    def rows(self, out: Tensor | None = None) -> Tensor:
        if self.norm is not None:
            return self.norm(self.residual, out)
        return self.residual if out is None else out.copy_(self.residual)


class LayerNorm:
    """(x - mean) / std * weight (+ bias); offset: 1 for families whose files store weight - 1."""

    __slots__ = ("bias", "eps", "has_bias", "offset", "rows", "size", "weight")

    weight: Tensor  # [size] float32
    bias: Tensor | None  # [size] float32
    rows: tuple[Axis, ...] | None  # how ranks share weight and bias; None: every rank has all of them

    def __init__(self, size: int, eps: float, bias: bool = True, offset: float = 0.0) -> None:
        self.size = size
        self.eps = eps
        self.has_bias = bias
        self.offset = offset
        self.rows = None

    def __call__(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """The norm of x, or of x + residual."""
        return layer_norm(x, self.weight, self.bias, self.eps, out, residual)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        kinds = ("weight", "bias") if self.has_bias else ("weight",)
        return {kind: (Wanted((self.size,)),) for kind in kinds}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        self.weight = _own(pieces["weight"][0], placement.device)
        self.weight += self.offset
        self.bias = _own(pieces["bias"][0], placement.device) if self.has_bias else None


Norm = RMSNorm | LayerNorm


def stream_norm(text: TextConfig) -> Norm:
    """A norm of a decoder's residual stream, which the decoder stores divided by its residual_scale.

    norm(s * x) with eps equals norm(x) with eps / s^2, so only the norm needs the scale.
    """
    eps = text.norm_eps / text.residual_scale**2
    if text.layer_norm:
        return LayerNorm(text.hidden_size, eps, text.norm_bias, text.norm_offset)
    return RMSNorm(text.hidden_size, eps, text.norm_offset)


def _own(piece: Tensor | None, device: str) -> Tensor:
    """A float32 copy that does not reference the mapped file."""
    assert piece is not None
    return piece.to(device, torch.float32, copy=True)
