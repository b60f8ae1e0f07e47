"""Gains: factors of a linear layer's inputs and results; loading multiplies the layer's weights by them.

Owner: the thread that builds the model. In: the scheme of a layer and its tensors, piece by piece. Out: the scheme and
the tensors with the gains applied. Floats are rounded once more to their dtype; codes get other scales and lose no
accuracy. A step therefore needs no launch for gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.codes import Codes
from engine.quant.base import Quantised, Scheme, Stored, Tensors
from engine.quant.checks import Checks
from engine.weights.table import Wanted

Gain = float | Tensor  # one factor for all rows of a piece, or a tensor with one factor per row


class Gains(NamedTuple):
    """The gains of one layer."""

    results: tuple[Gain, ...]  # of each piece: factor of its rows and biases
    inputs: float = 1.0  # factor of the layer's input

    def of_weights(self) -> list[Gain]:
        """The factor of each piece's weights."""
        return [gain * self.inputs for gain in self.results]


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A stored module, multiplied by a gain."""

    stored: Stored
    gain: Gain

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        return self.stored.wants(rows, columns)

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes | Tensor:
        found = self.stored.read(tensors, checks)
        return code_times(found, self.gain) if isinstance(found, Codes) else times(found, self.gain)

    @property
    def form(self) -> str:
        return self.stored.form


def multiplied(scheme: Scheme, tensors: Tensors, gains: Sequence[Gain]) -> tuple[Scheme, Tensors]:
    """Returns the scheme and the tensors of the pieces, multiplied by `gains`."""
    stored: Sequence[Stored | None] = (None,) * len(gains)
    if isinstance(scheme, Quantised):
        stored = scheme.pieces
        pieces = (None if each is None else Multiplied(each, gain) for each, gain in zip(stored, gains))
        scheme = replace(scheme, pieces=tuple(pieces))
    given = tensors.get("weight", [None] * len(gains))
    weights = [
        piece if piece is None or each is not None else times(piece, gain)
        for each, piece, gain in zip(stored, given, gains)
    ]
    return scheme, {**tensors, "weight": weights} if "weight" in tensors else tensors


def times(rows: Tensor, gain: Gain) -> Tensor:
    """rows [n, ...] times `gain`, in the same dtype; in place on an accelerator, where the loader owns the memory."""
    if not isinstance(gain, Tensor) and gain == 1.0:
        return rows
    made = (rows.float() * _per_row(gain, rows)).to(rows.dtype)
    return rows.copy_(made) if rows.is_cuda else made


def code_times(codes: Codes, gain: Gain) -> Codes:
    """The same codes with scales multiplied by `gain`."""
    if codes.scale.dtype == torch.float32:
        return replace(codes, scale=codes.scale * _per_row(gain, codes.scale))
    rows = codes.scale.new_ones(len(codes.scale), dtype=torch.float32) if codes.row_scale is None else codes.row_scale
    return replace(codes, row_scale=rows * _per_row(gain, rows))


def _per_row(gain: Gain, rows: Tensor) -> Gain:
    if not isinstance(gain, Tensor):
        return gain
    return gain.to(rows.device).view(-1, *([1] * (rows.dim() - 1)))
