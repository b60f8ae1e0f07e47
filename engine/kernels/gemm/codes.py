"""Codes: a quantised matrix in one canonical form, for all checkpoint formats.

    w[n, order[k]] = (value(codes[n, k]) - zero[n, k // group]) * scale[n, k // group] * row_scale[n]

Owner: the thread that builds the model. In: tensors read by a dialect (engine/quant). Out: the input of the weight
forms (group_panels on a CPU, groups on accelerators). Nothing is requantised: joined matrices keep separate scales.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Kind(Enum):
    """The meaning of codes."""

    INT4 = "int4"  # codes 0 .. 15, values -8 .. 7
    E2M1 = "e2m1"  # codes 0 .. 15: sign, two bits of exponent, one of mantissa
    NF4 = "nf4"  # codes 0 .. 15: indices into the float32 table NORMAL
    INT8 = "int8"  # codes and values -128 .. 127
    E4M3 = "e4m3"  # the bits of float8_e4m3fn


FOUR_BITS = (Kind.INT4, Kind.E2M1, Kind.NF4)
HALVES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # magnitudes of E2M1
# The values of NF4: quantiles of a normal distribution, scaled to a maximum of 1 (QLoRA, arXiv:2305.14314, appendix E).
NORMAL = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
VALUES = {
    Kind.INT4: torch.arange(-8, 8, dtype=torch.float64),
    Kind.E2M1: torch.tensor([*HALVES, *(-value for value in HALVES)], dtype=torch.float64),
    Kind.NF4: torch.tensor(NORMAL, dtype=torch.float64),
}


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """How the checkpoint quantises a matrix's inputs: per token, by one static scale, or per group of columns."""

    scale: Tensor | None = None  # [] float32: static scale; None: a dynamic scale per token
    kind: Kind = Kind.INT8  # or E4M3
    group: int = 0  # columns of a token per scale; 0: all columns
    powers: bool = False  # scales are powers of two


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """One matrix [N, K]."""

    kind: Kind
    values: Tensor  # [N, K] uint8; int8 for INT8
    scale: Tensor  # [N, ceil(K / group)] float32 or bfloat16
    group: int  # columns that share a scale; the last group may be shorter
    row_scale: Tensor | None = None  # [N] float32
    zero: Tensor | None = None  # [N, ceil(K / group)] int8 or float32: the zero point
    order: Tensor | None = None  # [K] int64: the index of column k in the checkpoint
    inputs: Inputs | None = None  # None: inputs are not quantised

    def rows(self, index: Tensor | slice) -> Codes:
        """The rows of `index`, in its order; views if it is a slice."""
        return replace(
            self,
            values=self.values[index],
            scale=self.scale[index],
            row_scale=None if self.row_scale is None else self.row_scale[index],
            zero=None if self.zero is None else self.zero[index],
        )

    def columns(self, first: int, end: int) -> Codes:
        """The columns `first` to `end` - 1 of a matrix whose columns have the checkpoint's order, as views. Groups that
        the bounds cut become several smaller groups with the same scale."""
        assert self.order is None, "columns in another order have no ranges"
        group = math.gcd(self.group, first, end if end < self.values.shape[1] else 0)
        if first // self.group == (end - 1) // self.group:
            group = end - first
        index: Tensor | slice = slice(first // self.group, (end - 1) // self.group + 1)
        if group < min(self.group, end - first):
            index = torch.arange(first, end, group, device=self.values.device) // self.group
        return replace(
            self,
            values=self.values[:, first:end],
            scale=self.scale[:, index],
            group=group,
            zero=None if self.zero is None else self.zero[:, index],
        )

    def copied(self, device: str) -> Codes:
        """A copy on `device`, whose tensors are contiguous and share no memory with these."""
        given = None if self.inputs is None else self.inputs.scale
        return replace(
            self,
            values=copied(self.values, device),
            scale=copied(self.scale, device),
            row_scale=None if self.row_scale is None else copied(self.row_scale, device),
            zero=None if self.zero is None else copied(self.zero, device),
            order=None if self.order is None else self.order.to(device),
            inputs=self.inputs and replace(self.inputs, scale=None if given is None else given.to(device)),
        )

    def with_float_inputs(self) -> Codes:
        """A copy without FP8 quantisation of inputs, for products with float inputs."""
        return replace(self, inputs=None) if self.inputs is not None and self.inputs.kind is Kind.E4M3 else self

    def dense(self) -> Tensor:
        """The matrix, [N, K] float64, with columns in the checkpoint's order."""
        group = torch.arange(self.values.shape[1], device=self.values.device) // self.group
        wide = decoded(self.kind, self.values)
        if self.zero is not None:
            wide = wide - self.zero.double()[:, group]
        wide = wide * self.scale.double()[:, group]
        if self.row_scale is not None:
            wide = wide * self.row_scale.double()[:, None]
        return wide if self.order is None else wide[:, torch.argsort(self.order)]


def copied(tensor: Tensor, device: str) -> Tensor:
    """A contiguous copy on `device`."""
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)


def decoded(kind: Kind, values: Tensor) -> Tensor:
    """The values of codes, float64."""
    if kind in VALUES:
        return VALUES[kind].to(values.device)[values.long()]
    return values.view(torch.float8_e4m3fn).double() if kind is Kind.E4M3 else values.double()


def alike(pieces: Sequence[Codes]) -> bool:
    """Whether these matrices can be stacked in one weight."""
    first = pieces[0]
    return all(
        (piece.kind, piece.group) == (first.kind, first.group)
        and _same(piece.order, first.order)
        and _same_inputs(piece.inputs, first.inputs)
        for piece in pieces
    )


def joined(pieces: Sequence[Codes]) -> Codes:
    """Stacks matrices for which `alike` holds."""
    if len(pieces) == 1:
        return pieces[0]
    scales = [piece.scale for piece in pieces]
    narrow = all(scale.dtype == torch.bfloat16 for scale in scales)
    row_scale = zero = None
    if any(piece.row_scale is not None for piece in pieces):
        row_scale = torch.cat([_or_ones(piece) for piece in pieces])
    if any(piece.zero is not None for piece in pieces):
        zeros = [_or_zeros(piece) for piece in pieces]
        whole = all(each.dtype == torch.int8 for each in zeros)
        zero = torch.cat(zeros if whole else [each.float() for each in zeros])
    return replace(
        pieces[0],
        values=torch.cat([piece.values for piece in pieces]),
        scale=torch.cat(scales if narrow else [scale.float() for scale in scales]),
        row_scale=row_scale,
        zero=zero,
        inputs=_joined_inputs(pieces),
    )


def _or_ones(piece: Codes) -> Tensor:
    return piece.scale.new_ones(len(piece.scale), dtype=torch.float32) if piece.row_scale is None else piece.row_scale


def _or_zeros(piece: Codes) -> Tensor:
    return torch.zeros_like(piece.scale, dtype=torch.int8) if piece.zero is None else piece.zero


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))


def _same_inputs(left: Inputs | None, right: Inputs | None) -> bool:
    """Whether inputs are quantised equally; FP8 scales may differ, since joined matrices share the largest."""
    if left is None or right is None:
        return left is right
    if (left.kind, left.group, left.powers) != (right.kind, right.group, right.powers):
        return False
    if left.kind is Kind.E4M3:
        return (left.scale is None) == (right.scale is None)
    return _same(left.scale, right.scale)


def _joined_inputs(pieces: Sequence[Codes]) -> Inputs | None:
    first = pieces[0].inputs
    if first is None or first.kind is not Kind.E4M3 or first.scale is None:
        return first
    given = [piece.inputs.scale for piece in pieces if piece.inputs is not None and piece.inputs.scale is not None]
    scales = torch.stack(given)
    if bool((scales != scales[0]).any()):
        least, most = scales.amin().item(), scales.amax().item()
        log.info("joined matrices have scales of %.3g to %.3g for their inputs: the largest is taken", least, most)
    return replace(first, scale=scales.amax())


def quantised_int8(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> integers -128 .. 127 as float32 [M, K], and a scale per row, float32 [M]; `scale`: a static scale."""
    wide = x.float()
    if scale is None:
        most = wide.abs().amax(1)
        scales = torch.where(most > 0, most / 127, 1.0)
    else:
        scales = scale.expand(len(x)).contiguous()
    return (wide / scales[:, None]).round_().clamp_(-128, 127), scales


LARGEST = 448.0  # the largest e4m3 value


def quantised_e4m3(x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes of e4m3, uint8 [M, K], and scales float32 [groups, M]."""
    columns = x.shape[1]
    size = inputs.group or columns
    runs = torch.nn.functional.pad(x.float(), (0, -columns % size)).unflatten(1, (-1, size))
    if inputs.scale is None:
        most = runs.abs().amax(2)
        scales = torch.where(most > 0, most / LARGEST, 1.0)
    else:
        scales = inputs.scale.expand(runs.shape[:2])
    if inputs.powers:
        scales = torch.exp2(torch.frexp(scales).exponent - (torch.frexp(scales).mantissa == 0.5).float())
    values = (runs / scales[:, :, None]).clamp(-LARGEST, LARGEST).flatten(1)[:, :columns]  # beyond, the cast gives NaN
    return values.to(torch.float8_e4m3fn).view(torch.uint8), scales.t().contiguous()
