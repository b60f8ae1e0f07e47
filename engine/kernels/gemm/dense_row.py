"""Products of one row with float weights: y = W x (+ bias) (+ residual), or activate(gate, up).

Matrix units need 16 rows. With one row the time is spent on reading the weight, so each thread multiplies and adds in
float32 the values that it has read, and shared memory is used only for the final sums. Weights do not depend on the
previous kernel, so a program loads all of its weight rows before it waits for x: o's weight is read while attention
waits for memory. gemm/epilogue has the norm before or after the product.
Users: gemm/dispatch on accelerators, for the shapes that kernels/tune.py names.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.epilogue import Unscaled, padded
from engine.kernels.gemm.split_k import Split, split_linear_reference
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton


class RowCut(NamedTuple):
    """How a product of one row is divided."""

    block_n: int  # weight rows per program; for a gated product, rows of gate and as many of up
    block_k: int  # columns read at a time
    warps: int


@triton.jit
def dense_row_kernel(
    out,  # [width]
    gained,  # [width] out * gain, or None
    counted,  # [programs] float32: sums of squares of out; with `gained`
    x,  # [depth]
    weight,  # [width, depth]; when GATED [2 * width, depth]
    bias,  # [width] or [2 * width], or None
    residual,  # [width], or None; may be out
    gain,  # [width] float32, with `gained`
    squares,  # [parts] float32 if x is Unscaled; or None
    width,
    depth,
    parts,
    eps,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    PARTS: tl.constexpr,  # power of two >= parts
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TURNS: tl.constexpr,  # iterations over BLOCK_K columns
    OVERLAP: tl.constexpr,
):
    """BLOCK_N results per program."""
    ROWS: tl.constexpr = BLOCK_N * (2 if GATED else 1)
    row, column, k = tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    piece = tl.program_id(0) * BLOCK_N + row % BLOCK_N
    n, n_in, inside = piece + row // BLOCK_N * width, piece < width, column < width
    w_at = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    tiles = ()
    for turn in tl.static_range(TURNS):
        there = n_in[:, None] & (turn * BLOCK_K + k < depth)[None, :]
        tiles += (tl.load(w_at + turn * BLOCK_K, mask=there, other=0.0),)  # type: ignore[assignment]
    biases, gains = 0.0, 0.0
    if bias is not None:
        biases = tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)
    if gained is not None:
        gains = tl.load(gain + column, mask=inside, other=0.0)
    grid_wait(OVERLAP)
    added, square = 0.0, 0.0
    if residual is not None:
        added = tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    if squares is not None:
        part = tl.arange(0, PARTS)
        square = tl.load(squares + part, mask=part < parts, other=0.0)
    total = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for turn in tl.static_range(TURNS):
        behind = turn * BLOCK_K + k
        tokens = tl.load(x + behind, mask=behind < depth, other=0.0).to(tl.float32)
        total += tiles[turn].to(tl.float32) * tokens[None, :]
    y = tl.sum(total, 1)
    if squares is not None:
        y *= 1.0 / tl.sqrt_rn(tl.sum(square, 0) / depth + eps)
    y += biases
    if GATED:
        gate, up = tl.split(y.reshape((2, BLOCK_N)).permute((1, 0)))
        y = activate(gate, up, ACT)
    y += added
    kept = y.to(out.dtype.element_ty)
    tl.store(out + column, kept, mask=inside)
    if gained is not None:
        kept = tl.where(inside, kept.to(tl.float32), 0.0)
        tl.store(counted + tl.program_id(0), tl.sum(kept * kept, 0))
        tl.store(gained + column, (kept * gains).to(out.dtype.element_ty), mask=inside)


def dense_row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: Activation | None, cut: RowCut, before: Unscaled | None = None, after: Unscaled | None = None,
) -> None:  # fmt: skip
    """x [1, K] times weight [N, K] into out [1, N]; with an activation weight [2N, K], gate first. Can be captured.

    bias [N] (gated: [2N]); residual [1, N], may be out itself. All tensors have the same 16-bit dtype, K is a multiple
    of 8. With `before`, x is its rows. `after`, from `empty_unscaled` with the cut's block_n, gets the data for the
    norm of out.
    """
    launch = launch_dense_row if x.is_cuda else dense_row_reference
    launch(x, weight, bias, residual, out, activation, cut, before, after)


def launch_dense_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: Activation | None, cut: RowCut, before: Unscaled | None = None, after: Unscaled | None = None,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as `dense_row_product`."""
    (rows, depth), width, gated = x.shape, out.shape[1], activation is not None
    assert rows == 1 and depth % 8 == 0 and x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    assert weight.shape == (2 * width if gated else width, depth), f"{tuple(weight.shape)} times {tuple(x.shape)}"
    programs, parts = triton.cdiv(width, cut.block_n), 0 if before is None else len(before.squares)
    assert after is None or (len(after.squares) == programs and not gated)
    dense_row_kernel[(programs,)](
        out, None if after is None else after.rows, None if after is None else after.squares, x, weight, bias,
        residual, None if after is None else after.gain, None if before is None else before.squares, width, depth,
        parts, 0.0 if before is None else before.eps, GATED=gated, ACT=int(activation or 0),
        PARTS=padded(parts, 1) if parts else 0, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k,
        TURNS=triton.cdiv(depth, cut.block_k), num_warps=cut.warps,
        num_stages=1, **launch_options(),
    )  # fmt: skip


def dense_row_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: Activation | None, cut: RowCut, before: Unscaled | None = None, after: Unscaled | None = None,
) -> None:  # fmt: skip
    """gemm/split_k's reference, which does not depend on the cut."""
    whole = Split(cut.block_n, cut.block_k, 1, 1, cut.warps)
    split_linear_reference(x, weight, bias, residual, out, activation, whole, before, after)
