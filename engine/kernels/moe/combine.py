"""Sums the experts' results of each token: out = sum over k of weight[k] * made[k] (+ shared) (+ residual).

The sum is in float32, in the order of the token's choices, then the shared MLP's result (times the sigmoid of its
gate), then the residual, and is rounded once. With few rows a following product gets the rows prescaled for its norm
(gemm/epilogue), so that the norm needs no kernel. Experts add nothing to padding rows, and experts of other ranks add
nothing to any row.
Users: engine/layers/moe.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.epilogue import Unscaled, empty_unscaled
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.room import MAX_ROWS
from engine.kernels.target import tl, triton

BLOCK = 512  # columns per program


class Summands(NamedTuple):
    """What is added to the experts' results of each token, and their weights; see `combine`."""

    weights: Tensor | None
    shared: Tensor | None
    gate: Tensor | None
    residual: Tensor | None
    live: Tensor | None  # `count`


@triton.jit
def with_rest(total, shared, gate, residual, row, at, inside):
    """Adds the shared MLP's result, times the sigmoid of its gate, and the residual stream to a row's columns `at`."""
    if shared is not None:
        added = tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            added = added / (1.0 + tl.exp(-tl.load(gate + row).to(tl.float32)))
        total += added
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def combine_kernel(
    out,  # [rows, width]; may be residual
    gained,  # [rows, width] out * gain when AFTER
    counted,  # [blocks, rows] float32 when AFTER
    made,  # [rows, TOP_K, width]
    weights,  # [rows, TOP_K] float32, or None: all are 1
    shared,  # [rows, width], or None
    gate,  # [rows], or None
    residual,  # [rows, width], or None
    gain,  # [width] float32 when AFTER
    count,  # [1] int32: rows from here on are padding; None: no padding
    chosen,  # [rows, TOP_K] int32: experts, or None: all are this rank's
    held,  # this rank's experts are 0 to held - 1
    width,
    TOP_K: tl.constexpr,
    AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes BLOCK columns of a row per program."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    grid_wait(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    real = inside
    if count is not None:
        real = column < tl.where(row < tl.load(count), width, 0)
    for slot in tl.static_range(TOP_K):  # all loads are issued at once
        there = real
        if chosen is not None:
            there = column < tl.where(tl.load(chosen + row * TOP_K + slot) < held, tl.where(real, width, 0), 0)
        each = tl.load(made + (row * TOP_K + slot) * width + column, mask=there, other=0.0).to(tl.float32)
        if weights is not None:
            each *= tl.load(weights + row * TOP_K + slot)
        total += each
    at = row * width + column
    rounded = with_rest(total, shared, gate, residual, row, at, inside).to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if AFTER:
        kept = tl.where(inside, rounded.to(tl.float32), 0.0)
        tl.store(counted + block * tl.num_programs(0) + row, tl.sum(kept * kept, 0))
        gains = tl.load(gain + column, mask=inside, other=0.0)
        tl.store(gained + at, (kept * gains).to(out.dtype.element_ty), mask=inside)


def combine(
    made: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    count: Tensor | None = None,
    chosen: Tensor | None = None,
    held: int = 0,
) -> Tensor:
    """made [T, top_k, H], weights [T, top_k] float32 -> [T, H] of made's dtype: `residual`, in place, or new.

    shared [T, H]: the shared MLP's result; gate [T, 1]: its sigmoid multiplies `shared`; count: as in moe/route.
    weights None: all weights are 1. chosen, held: int32 [T, top_k], experts of which only those below `held` add.
    """
    launch = launch_combine if made.is_cuda else combine_reference
    return launch(made, weights, shared, gate, residual, None, count, chosen, held)


def combine_then_norm(
    made: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    gate: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    eps: float,
    count: Tensor | None = None,
) -> Unscaled | None:
    """`combine` into residual; the next product reads rms_norm(residual, gain, eps). Returns prescaled rows if few."""
    prescaled = len(residual) <= MAX_ROWS and made.is_cuda and made.dtype is torch.bfloat16
    after = empty_unscaled(residual, BLOCK, gain, eps) if prescaled else None
    launch = launch_combine if made.is_cuda else combine_reference
    launch(made, weights, shared, gate, residual, after, count)
    return after


def launch_combine(
    made: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    after: Unscaled | None,
    count: Tensor | None = None,
    chosen: Tensor | None = None,
    held: int = 0,
) -> Tensor:
    """The Triton kernel; `after`, from `empty_unscaled` with BLOCK, gets the data for the norm of the result."""
    rows, top_k, width = made.shape
    out = made.new_empty(rows, width) if residual is None else residual
    assert made.is_contiguous() and out.is_contiguous() and out.dtype is made.dtype
    assert weights is None or weights.is_contiguous()
    assert chosen is None or (chosen.is_contiguous() and chosen.dtype is torch.int32)
    assert shared is None or (shared.shape == out.shape and shared.is_contiguous())
    if rows:
        combine_kernel[(rows, triton.cdiv(width, BLOCK))](
            out, out if after is None else after.rows, out if after is None else after.squares, made, weights,
            shared, gate, residual, out if after is None else after.gain, count, chosen, held, width,
            TOP_K=top_k, AFTER=after is not None, BLOCK=BLOCK, num_warps=4, **launch_options(),
        )  # fmt: skip
    return out


def combine_reference(
    made: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    after: Unscaled | None,
    count: Tensor | None = None,
    chosen: Tensor | None = None,
    held: int = 0,
) -> Tensor:
    wide = torch.float64 if made.dtype == torch.float64 else torch.float32
    weights = made.new_ones(made.shape[:2]) if weights is None else weights
    weights = weights.to(wide)
    if count is not None:
        made = made.masked_fill(torch.arange(len(made), device=made.device)[:, None, None] >= count, 0.0)
    if chosen is not None:
        made = made.masked_fill((chosen >= held)[:, :, None], 0.0)
    total = made[:, 0].to(wide) * weights[:, :1]
    for slot in range(1, made.shape[1]):
        total += made[:, slot].to(wide) * weights[:, slot : slot + 1]
    if shared is not None:
        # float64, because torch uses other instructions for the end of a float32 tensor, whose last bit may differ
        total += shared.to(wide) if gate is None else shared.to(wide) * gate.double().sigmoid().to(wide)
    out = total.to(made.dtype) if residual is None else residual.copy_(total + residual)
    if after is not None:
        after.rows.copy_(out.to(wide) * after.gain)
        after.squares.zero_()[0] = out.to(wide).square().sum(1)
    return out
