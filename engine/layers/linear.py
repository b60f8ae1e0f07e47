"""Linear: one Weight made of one or more checkpoint matrices stacked by rows (q|k|v, gate|up).

Owner: the model; read only after loading. In: [..., in_features]. Out: [..., sum of out_features], same dtype.
Convolutions whose stride equals their kernel, or whose input is unrolled first, are linear layers too: `fold` is the
shape of the trailing dimensions in the checkpoint, which are flattened.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.base.dealing import Axis, Section
from engine.kernels.activation import Activation
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.weight import Weight
from engine.layers.norm import LayerNorm, Normed, RMSNorm
from engine.quant.base import UNQUANTISED, Arrange, Scheme
from engine.quant.gains import Gains, multiplied, times
from engine.weights.table import Shape, Wanted


class Around(Protocol):
    """The adapters of a layer's matrix (engine/layers/adapted.py)."""

    def around(self, base: Weight) -> Weight:
        """The layer's weight with adapters, made from the matrix's weight."""


class Linear:
    """y = x W^T + b."""

    __slots__ = (
        "arrange",
        "biases",
        "columns",
        "fold",
        "gains",
        "in_features",
        "of_summands",
        "out_features",
        "rows",
        "scheme",
        "site",
        "weight",
    )

    weight: Weight
    arrange: Arrange | None
    gains: Gains | None  # multiply what the checkpoint's matrices make
    site: Around | None
    # How ranks share the matrix: each piece's rows, or the columns; then the rank's results are summands. None: a rank
    # has all of them.
    rows: tuple[Axis, ...] | None
    columns: Axis | None
    of_summands: bool  # every rank has the whole matrix, and its inputs are summands, as its results are

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
        self.scheme: Scheme = UNQUANTISED
        self.arrange = self.gains = self.site = self.rows = self.columns = None
        self.of_summands = False
        assert torch.Size(self.fold).numel() == in_features

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.linear(x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += x W^T + b, in place, fused."""
        self.weight.linear(x, residual, residual)

    def normed_sum(self, norm: LayerNorm, residual: Tensor, x: Tensor) -> Tensor:
        """norm(residual + x W^T + b), fused as far as the weight's form allows; residual may be overwritten."""
        if self.weight.sums_in_two:
            return norm(self.weight.linear(x), residual=residual)
        self.add_to(residual, x)
        return norm(residual)

    def of_normed(self, normed: Normed) -> Tensor:
        """norm(residual) W^T + b."""
        norm = normed.norm
        if not isinstance(norm, RMSNorm):
            return self.weight.linear(normed.rows())
        return self.weight.of_normed(normed.residual, norm.weight, norm.eps, normed.prescaled, None)

    def add_then(self, norm: RMSNorm, residual: Tensor, x: Tensor) -> Normed:
        """`add_to`, if the next reader of the stream is a linear layer of norm(residual)."""
        return Normed(norm, residual, self.weight.add_then_norm(residual, x, norm.weight, norm.eps))

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        wanted = self.scheme.expects(self.out_features, self.fold)
        if any(self.biases):
            wanted["bias"] = tuple(
                Wanted((rows,)) if has else None for rows, has in zip(self.out_features, self.biases)
            )
        return wanted

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        self._fill(pieces, placement, gated=False)

    def _fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement, gated: bool) -> None:
        scheme, bias = self.scheme, None
        if any(self.biases):
            parts = [
                torch.zeros(rows, device=placement.device)
                if piece is None
                else self._bias(number, piece.to(placement.device, torch.float32))
                for number, (rows, piece) in enumerate(zip(self.out_features, pieces["bias"]))
            ]
            bias = torch.cat(parts)  # a piece without a bias adds zero
            pieces = {kind: given for kind, given in pieces.items() if kind != "bias"}
        if self.gains is not None:
            scheme, pieces = multiplied(scheme, pieces, self.gains.of_weights())
        self.weight = scheme.weight(pieces, bias, placement, gated, self.arrange)
        if self.site is not None:
            self.weight = self.site.around(self.weight)

    def _bias(self, number: int, rows: Tensor) -> Tensor:
        rows = rows if self.gains is None else times(rows, self.gains.results[number])
        return rows if self.arrange is None else self.arrange(number, rows)


class GatedLinear(Linear):
    """activate(x G^T + g, x U^T + u): gate and up of a gated MLP, fused if the weight's form allows.

    `joined`: the checkpoint has gate and up in one matrix, gate's rows first.
    """

    __slots__ = ("activation",)

    def __init__(self, in_features: int, width: int, bias: bool, activation: Activation, joined: bool = False) -> None:
        super().__init__(in_features, *((2 * width,) if joined else (width, width)), bias=bias)
        self.activation = activation
        half = Section(width, coarse=True)
        self.rows = ((half, half),) if joined else ((half,), (half,))

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.gated(x, self.activation)

    def of_normed(self, normed: Normed) -> Tensor:
        norm = normed.norm
        if not isinstance(norm, RMSNorm):
            return self.weight.gated(normed.rows(), self.activation)
        return self.weight.of_normed(normed.residual, norm.weight, norm.eps, normed.prescaled, self.activation)

    def halves_of_normed(self, normed: Normed) -> Tensor:
        """gate, then up, [T, 2 * width], before the activation; for weights with `takes_halves`."""
        return super().of_normed(normed)

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        self._fill(pieces, placement, gated=True)
