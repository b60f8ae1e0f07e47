"""Codes: a quantised matrix in one canonical form, whatever the checkpoint called it.

    w[n, order[k]] = (value(codes[n, k]) - zero[n, k // group]) * scale[n, k // group] * row_scale[n]

Owner: the thread that builds the model. In: what a dialect (engine/quant) read. Out: what the forms of weights pack
(group_panels on a CPU, groups on accelerators). Nothing is requantised: joined matrices keep their own scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor


class Kind(Enum):
    """What a code stands for."""

    INT4 = "int4"  # codes 0 .. 15, values -8 .. 7
    E2M1 = "e2m1"  # codes 0 .. 15: sign, two bits of exponent, one of mantissa
    INT8 = "int8"  # codes and values -128 .. 127
    E4M3 = "e4m3"  # the bits of float8_e4m3fn


FOUR_BITS = (Kind.INT4, Kind.E2M1)
HALVES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of E2M1
VALUES = {
    Kind.INT4: torch.arange(-8, 8, dtype=torch.float64),
    Kind.E2M1: torch.tensor([*HALVES, *(-value for value in HALVES)], dtype=torch.float64),
}


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The checkpoint quantises what it multiplies by to int8: per token, or by one scale for all."""

    scale: Tensor | None = None  # [] float32; None: per token, as it comes


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """One matrix [N, K]."""

    kind: Kind
    values: Tensor  # [N, K] uint8, of INT8 int8
    scale: Tensor  # [N, ceil(K / group)] float32 or bfloat16
    group: int  # columns that share a scale; the last group may be shorter
    row_scale: Tensor | None = None  # [N] float32
    zero: Tensor | None = None  # [N, ceil(K / group)] int8, the value that stands for zero
    order: Tensor | None = None  # [K] int64: where column k was in the checkpoint
    inputs: Inputs | None = None  # None: they are kept as they are

    def rows(self, index: Tensor) -> Codes:
        """These rows, in this order."""
        return replace(
            self,
            values=self.values[index],
            scale=self.scale[index],
            row_scale=None if self.row_scale is None else self.row_scale[index],
            zero=None if self.zero is None else self.zero[index],
        )

    def dense(self) -> Tensor:
        """The matrix, [N, K] float64, columns as in the checkpoint."""
        group = torch.arange(self.values.shape[1], device=self.values.device) // self.group
        wide = decoded(self.kind, self.values)
        if self.zero is not None:
            wide = wide - self.zero.double()[:, group]
        wide = wide * self.scale.double()[:, group]
        if self.row_scale is not None:
            wide = wide * self.row_scale.double()[:, None]
        return wide if self.order is None else wide[:, torch.argsort(self.order)]


def decoded(kind: Kind, values: Tensor) -> Tensor:
    """The values of codes, float64."""
    if kind in VALUES:
        return VALUES[kind].to(values.device)[values.long()]
    return values.view(torch.float8_e4m3fn).double() if kind is Kind.E4M3 else values.double()


def alike(pieces: Sequence[Codes]) -> bool:
    """Whether these matrices can lie below one another in one weight."""
    first = pieces[0]
    return all(
        (piece.kind, piece.group) == (first.kind, first.group)
        and _same(piece.order, first.order)
        and _same_inputs(piece.inputs, first.inputs)
        for piece in pieces
    )


def joined(pieces: Sequence[Codes]) -> Codes:
    """Matrices that are alike, one below the other."""
    if len(pieces) == 1:
        return pieces[0]
    scales = [piece.scale for piece in pieces]
    narrow = all(scale.dtype == torch.bfloat16 for scale in scales)
    row_scale = zero = None
    if any(piece.row_scale is not None for piece in pieces):
        row_scale = torch.cat([_or_ones(piece) for piece in pieces])
    if any(piece.zero is not None for piece in pieces):
        zero = torch.cat([_or_zeros(piece) for piece in pieces])
    return replace(
        pieces[0],
        values=torch.cat([piece.values for piece in pieces]),
        scale=torch.cat(scales if narrow else [scale.float() for scale in scales]),
        row_scale=row_scale,
        zero=zero,
    )


def _or_ones(piece: Codes) -> Tensor:
    return piece.scale.new_ones(len(piece.scale), dtype=torch.float32) if piece.row_scale is None else piece.row_scale


def _or_zeros(piece: Codes) -> Tensor:
    return torch.zeros_like(piece.scale, dtype=torch.int8) if piece.zero is None else piece.zero


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))


def _same_inputs(left: Inputs | None, right: Inputs | None) -> bool:
    if left is None or right is None:
        return left is right
    return _same(left.scale, right.scale)


def quantised_int8(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> integers -128 .. 127 as float32 [M, K], and a scale per row, float32 [M]; `scale`: one for all."""
    wide = x.float()
    if scale is None:
        most = wide.abs().amax(1)
        scales = torch.where(most > 0, most / 127, 1.0)
    else:
        scales = scale.expand(len(x)).contiguous()
    return (wide / scales[:, None]).round_().clamp_(-128, 127), scales
