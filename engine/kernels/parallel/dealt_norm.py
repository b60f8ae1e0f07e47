"""Norms over columns of which each rank has a part: the parts' sums of squares, and then the norm, in place.

    sums[row, p] = sum of x^2 over part p              ranks add their sums (exchange.py) between the two launches
    x = x / sqrt(sums[row, p] / count + eps) * weight (* silu(z))

A rank has the parts from `first` on, one or two, one after the other from column 0 of x on; its sums of other parts are
0. A row's sums do not depend on other rows. Users: attention with norms over whole projections (parts: all queries, all
keys), Mamba-2 with fewer groups than ranks (parts: the groups, of which the rank has channels of one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

MOST_COLUMNS = 4096  # that a program reads at once


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a norm's rows that ranks share."""

    widths: tuple[int, ...]  # columns of this rank's parts, one or two
    counts: tuple[int, ...]  # columns by which the sums of all ranks are divided, for each of these parts
    first: int  # number of this rank's first part
    total: int  # parts on all ranks: columns of the sums

    @property
    def pair(self) -> tuple[int, int]:
        """The widths of two parts; a second part that is missing has none."""
        return self.widths[0], sum(self.widths[1:])


@triton.jit
def dealt_squares_kernel(
    sums,  # [rows, TOTAL] float32
    x,  # [rows, ...], rows `stride` apart
    stride,
    first,
    first_width,
    second_width,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes one part's sum of one row."""
    grid_wait(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1) - first
    width = tl.where(part == 0, first_width, tl.where(part == 1, second_width, 0))
    start = x + row * stride + tl.where(part == 1, first_width, 0)
    found = tl.zeros([BLOCK], tl.float32)
    for at in range(0, width, BLOCK):
        column = at + tl.arange(0, BLOCK)
        values = tl.load(start + column, mask=column < width, other=0.0).to(tl.float32)
        found += values * values
    tl.store(sums + row * TOTAL + tl.program_id(1), tl.sum(found, 0))


@triton.jit
def dealt_norm_kernel(
    x,  # [rows, ...], rows `stride` apart; changed in place
    sums,  # [rows, TOTAL] float32
    first_weight,  # [first_width] float32
    second_weight,  # [second_width] float32
    gates,  # z [rows, ...], rows `gate_stride` apart, or None
    stride,
    gate_stride,
    first,
    first_width,
    second_width,
    first_count,
    second_count,
    eps,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program normalises one part of one row."""
    grid_wait(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_first = part == 0
    width, count = tl.where(is_first, first_width, second_width), tl.where(is_first, first_count, second_count)
    scale = 1.0 / tl.sqrt_rn(tl.load(sums + row * TOTAL + first + part) / count + eps)
    weight = first_weight if is_first else second_weight
    start = tl.where(is_first, 0, first_width)
    for at in range(0, width, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < width
        place = x + row * stride + start + column
        y = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
        y *= tl.load(weight + column, mask=inside, other=0.0)
        if gates is not None:
            z = tl.load(gates + row * gate_stride + start + column, mask=inside, other=0.0).to(tl.float32)
            y *= z / (1.0 + tl.exp(-z))
        tl.store(place, y.to(x.dtype.element_ty), mask=inside)


def dealt_squares(x: Tensor, parts: Parts) -> Tensor:
    """x [T, n], whose first columns are the rank's parts -> sums of squares, float32 [T, parts.total], new."""
    return launch_dealt_squares(x, parts) if x.is_cuda else dealt_squares_reference(x, parts)


def launch_dealt_squares(x: Tensor, parts: Parts) -> Tensor:
    """Launches the kernel."""
    assert x.stride(1) == 1, "rows must be contiguous"
    assert 1 <= len(parts.widths) <= 2, "one or two parts"
    sums = x.new_empty(len(x), parts.total, dtype=torch.float32)
    block = _block(parts)
    if len(x):
        dealt_squares_kernel[(len(x), parts.total)](
            sums, x, x.stride(0), parts.first, *parts.pair, TOTAL=parts.total, BLOCK=block, num_warps=_warps(block),
            **launch_options(),
        )  # fmt: skip
    return sums


def dealt_squares_reference(x: Tensor, parts: Parts) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    sums, end = torch.zeros(len(x), parts.total, dtype=wide, device=x.device), 0
    for number, width in enumerate(parts.widths, parts.first):
        sums[:, number] = x[:, end : end + width].to(wide).square().sum(1)
        end += width
    return sums


def normalise_dealt(
    x: Tensor, sums: Tensor, weights: Sequence[Tensor], parts: Parts, eps: float, gates: Tensor | None = None
) -> None:
    """Normalises the rank's parts of x [T, n] in place; sums [T, parts.total]: of all ranks; weights: float32, one for
    each of the rank's parts; gates z [T, n]: the result is multiplied by silu(z)."""
    launch = launch_dealt_norm if x.is_cuda else dealt_norm_reference
    launch(x, sums, weights, parts, eps, gates)


def launch_dealt_norm(
    x: Tensor, sums: Tensor, weights: Sequence[Tensor], parts: Parts, eps: float, gates: Tensor | None = None
) -> None:
    """Launches the kernel; arguments as `normalise_dealt`."""
    assert x.stride(1) == 1, "rows must be contiguous"
    assert gates is None or gates.stride(1) == 1, "rows of gates must be contiguous"
    assert sums.is_contiguous() and sums.shape == (len(x), parts.total), f"sums of {list(sums.shape)}"  # noqa: PT018
    assert [len(each) for each in weights] == list(parts.widths), "a weight for each part"
    block = _block(parts)
    if len(x):
        dealt_norm_kernel[(len(x), len(parts.widths))](
            x, sums, weights[0], weights[-1], gates, x.stride(0), 0 if gates is None else gates.stride(0), parts.first,
            *parts.pair, parts.counts[0], parts.counts[-1], eps, TOTAL=parts.total, BLOCK=block,
            num_warps=_warps(block), **launch_options(),
        )  # fmt: skip


def dealt_norm_reference(
    x: Tensor, sums: Tensor, weights: Sequence[Tensor], parts: Parts, eps: float, gates: Tensor | None = None
) -> None:
    wide, end = torch.promote_types(x.dtype, torch.float32), 0
    for number, (width, count, weight) in enumerate(zip(parts.widths, parts.counts, weights)):
        own = x[:, end : end + width]
        mean = sums[:, parts.first + number, None].to(wide) / count
        made = own.to(wide) * torch.rsqrt(mean + eps) * weight
        own.copy_(made if gates is None else made * silu(gates[:, end : end + width].to(wide)))
        end += width


def _block(parts: Parts) -> int:
    return int(min(MOST_COLUMNS, triton.next_power_of_2(max(parts.widths))))


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))
