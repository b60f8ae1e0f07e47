"""Epilogue of products of few rows: bias, gate, residual, and most of the RMSNorm between two products.

An RMSNorm between two such products needs no kernel. The first product adds to the residual stream; it also writes the
rows times the norm's gain, and the sums of squares of each tile (`Unscaled`). The second product multiplies these rows
and divides its sums by the root mean square, since (r / rms * gain) W^T = (r * gain) W^T / rms.
Users: gemm/split_k, whose kernels call `squares_of`, `load_epilogue_operands` and `finish`. gemm/groups and gemm/float8
use `scaled_plus`, because there a row's bits must not depend on other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import activate
from engine.kernels.room import MAX_BLOCK, empty_rows
from engine.kernels.target import tl, triton

MAX_SQUARES = 1 << 13  # most sums of squares that a program adds up: 64 registers per thread


class Unscaled(NamedTuple):
    """Rows r prescaled for the norm after a product: multiplied by the gain, not yet divided by the root mean
    square."""

    rows: Tensor  # [M, K] r * gain, rounded as the norm would
    squares: Tensor  # [parts, M] float32: sums of r^2 over the columns of each tile
    gain: Tensor  # [K] float32
    eps: float


@triton.jit
def scaled_plus(sums, scale, added):
    """sums * scale + added as an explicit fma, because a compiler may fuse it in one variant of a kernel and not in
    another."""
    return tl.fma(sums, tl.broadcast_to(scale, sums.shape), added)


@triton.jit
def squares_of(squares, m, rows, parts, PARTS: tl.constexpr):
    """Loads the sums of squares of rows m, [PARTS] per row, before the product that they will divide."""
    piece = tl.arange(0, PARTS)[:, None]
    return tl.load(squares + piece * rows + m[None, :], mask=(piece < parts) & (m < rows)[None, :], other=0.0)


@triton.jit
def load_epilogue_operands(
    residual, gain, n, m, rows, width, RESIDUAL: tl.constexpr, AFTER: tl.constexpr, AXIS: tl.constexpr
):
    """Loads the operands of `finish` before the sums, so that they arrive while the program multiplies."""
    added, gains = 0.0, 0.0
    if RESIDUAL:
        n_at, m_at = tl.expand_dims(n, 1 - AXIS), tl.expand_dims(m, AXIS)
        inside = (n_at < width) & (m_at < rows)
        added = tl.load(residual + m_at.to(tl.int64) * width + n_at, mask=inside, other=0.0)
    if AFTER:
        gains = tl.load(gain + n, mask=n < width, other=0.0)
    return added, gains


@triton.jit
def finish(
    out, gained, counted, bias, added, gains, square, sums, ups, n, m, tile, rows, width, depth, eps,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, PARTS: tl.constexpr,
    AFTER: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Finishes the sums (of gate and up) for rows m and columns n; columns are axis AXIS of the tile."""
    n_at, m_at = tl.expand_dims(n, 1 - AXIS), tl.expand_dims(m, AXIS)
    n_in = n < width
    inside = (n_at < width) & (m_at < rows)
    if PARTS:
        scale = tl.expand_dims(1.0 / tl.sqrt_rn(tl.sum(square, 0) / depth + eps), AXIS)
        sums *= scale
        ups *= scale
    if BIAS:
        sums += tl.expand_dims(tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32), 1 - AXIS)
    if GATED:
        if BIAS:
            ups += tl.expand_dims(tl.load(bias + width + n, mask=n_in, other=0.0).to(tl.float32), 1 - AXIS)
        sums = activate(sums, ups, ACT)
    target = m_at.to(tl.int64) * width + n_at
    if RESIDUAL:
        sums += added.to(tl.float32)
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=inside)
    if AFTER:
        kept = tl.where(inside, sums.to(out.dtype.element_ty).to(tl.float32), 0.0)
        tl.store(counted + tile * rows + m, tl.sum(kept * kept, AXIS), mask=m < rows)
        tl.store(gained + target, (kept * tl.expand_dims(gains, 1 - AXIS)).to(out.dtype.element_ty), mask=inside)


def empty_unscaled(out: Tensor, block_n: int, gain: Tensor, eps: float) -> Unscaled | None:
    """Memory for the Unscaled of a product into out [M, N]: the rows, and a sum of squares per tile of block_n columns.
    None: there are too many sums."""
    rows, width = out.shape
    parts = -(-width // block_n)
    if padded(parts, 1) * min(padded(rows, 16), MAX_BLOCK) > MAX_SQUARES:
        return None
    squares = torch.empty(parts, rows, dtype=torch.float32, device=out.device)
    return Unscaled(empty_rows(out, width), squares, gain, eps)


def padded(count: int, least: int) -> int:
    """A tile's side: the next power of two of `count`, at least `least`."""
    return max(least, 1 << (count - 1).bit_length())
