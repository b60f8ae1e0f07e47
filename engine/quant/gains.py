"""Gains: numbers that a model multiplies the results of a linear layer by, taken into its weights when it is filled.

Owner: the thread that builds the model. In: the scheme of a layer and its tensors, piece by piece. Out: both, so that
the weights have the gains: floats are rounded once more to their dtype, codes get other scales and lose nothing. So a
step launches nothing for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.codes import Codes
from engine.quant.base import Quantised, Scheme, Stored, Tensors
from engine.weights.table import Wanted

Gain = float | Tensor  # of all rows of a piece, or of each


class Gains(NamedTuple):
    """Of one layer."""

    results: tuple[Gain, ...]  # of each piece: of its rows and their biases
    inputs: float = 1.0  # of what the layer reads

    def of_weights(self) -> list[Gain]:
        """By piece."""
        return [gain * self.inputs for gain in self.results]


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A module that is stored in some way, times a gain."""

    stored: Stored
    gain: Gain

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        return self.stored.wants(rows, columns)

    def read(self, tensors: Mapping[str, Tensor]) -> Codes | Tensor:
        found = self.stored.read(tensors)
        return code_times(found, self.gain) if isinstance(found, Codes) else times(found, self.gain)

    @property
    def form(self) -> str:
        return self.stored.form


def multiplied(scheme: Scheme, tensors: Tensors, gains: Sequence[Gain]) -> tuple[Scheme, Tensors]:
    """The scheme and the tensors of pieces that are multiplied by `gains`."""
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
    """rows [n, ...] times its gain, of the same dtype; in place on an accelerator, where the loader made room."""
    if not isinstance(gain, Tensor) and gain == 1.0:
        return rows
    made = (rows.float() * _per_row(gain, rows)).to(rows.dtype)
    return rows.copy_(made) if rows.is_cuda else made


def code_times(codes: Codes, gain: Gain) -> Codes:
    """The same codes, of a matrix that is so much larger."""
    if codes.scale.dtype == torch.float32:
        return replace(codes, scale=codes.scale * _per_row(gain, codes.scale))
    rows = codes.scale.new_ones(len(codes.scale), dtype=torch.float32) if codes.row_scale is None else codes.row_scale
    return replace(codes, row_scale=rows * _per_row(gain, rows))


def _per_row(gain: Gain, rows: Tensor) -> Gain:
    if not isinstance(gain, Tensor):
        return gain
    return gain.to(rows.device).view(-1, *([1] * (rows.dim() - 1)))
