"""Products of few rows (1 to 256), split along the summed axis: y = x W^T (+ bias) (+ residual), or activate(gate, up).

A product of few rows reads every weight once and computes very little, so all units must read all the time. A small
output has fewer tiles than the card has units, so its sums are divided into parts, one program each. A program writes
its partial sums in float32; the program that arrives last adds all parts in their order, so the result does not depend
on which program is last. The last program loads all parts at once. Every program loads the residual before its sums,
because any program may be the last (saves a microsecond for o and down).
Up to 64 rows are one tile, whose long side is the weight rows (a matrix unit needs 64). More rows with small weights
also keep the matrix units busy: then rows are divided into tiles too, and blocks are loaded by descriptors, from
operands whose memory is padded to a full tile if possible (kernels/room: saves 4 us of a layer's 32 at 72 rows).
gemm/epilogue has the norm before or after such a product.
Users: gemm/dispatch on accelerators, for the shapes that kernels/tune.py names.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate_reference
from engine.kernels.gemm.descriptors import describe, is_aligned
from engine.kernels.gemm.epilogue import (
    Unscaled,
    finish,
    load_epilogue_operands,
    padded,
    squares_of,
)
from engine.kernels.pdl import grid_wait, launch_options, overlaps
from engine.kernels.room import MAX_BLOCK, MAX_ROWS, whole_tiles
from engine.kernels.target import tl, triton

PREFETCH = 4  # lines of each weight row that a program prefetches while the previous kernel still runs
MAX_TILES = 1 << 14  # most tiles of weight rows of a split launch


class Split(NamedTuple):
    """How a product of few rows is divided."""

    block_n: int  # weight rows per tile; for a gated product, rows of gate and as many of up
    block_k: int  # columns read at a time
    splits: int  # programs that share a tile's sum
    stages: int  # loads in flight
    warps: int
    block_m: int = 0  # rows per tile, loaded by descriptors; 0: all rows are one tile, loaded by pointers


@triton.jit
def fetch(address, inside):
    """Prefetches lines into the L2 cache without waiting. address: [lines] pointers to 2-byte values."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_lines(weight, n, width, depth, start, GATED: tl.constexpr, PREFETCH: tl.constexpr):
    """Prefetches lines of 64 columns of the weight rows n, from column `start` on."""
    if PREFETCH:
        line = start + tl.arange(0, PREFETCH) * 64
        inside = (n < width)[:, None] & (line < depth)[None, :]
        fetch(weight + n.to(tl.int64)[:, None] * depth + line[None, :], inside)
        if GATED:
            fetch(weight + (n.to(tl.int64) + width)[:, None] * depth + line[None, :], inside)


@triton.jit(do_not_specialize=["rows"])
def split_kernel(
    out,  # [rows, width]
    gained,  # [rows, width] out * gain when AFTER
    counted,  # [tiles, rows] float32 when AFTER
    partial,  # [tiles, SPLITS, 1 or 2 when GATED, BLOCK_N, BLOCK_M] float32 when SPLITS > 1
    arrived,  # [MAX_TILES] int32 when SPLITS > 1; zero before and after
    x,  # [rows, depth], rows x_stride apart
    weight,  # [width, depth]; when GATED [2 * width, depth]
    bias,  # [width] or [2 * width] when BIAS
    residual,  # [rows, width] when RESIDUAL; may be out
    gain,  # [width] float32 when AFTER
    squares,  # [parts, rows] float32 when PARTS
    rows,
    width,
    depth,
    x_stride,
    part_len,  # columns of a split, a multiple of BLOCK_K
    parts,
    eps,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    SPLITS: tl.constexpr,  # programs that share a tile
    PARTS: tl.constexpr,  # 0: x is plain rows; else x is Unscaled, and PARTS is a power of two >= parts
    AFTER: tl.constexpr,  # also write the Unscaled of out, for a norm
    BLOCK_M: tl.constexpr,  # power of two >= rows
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    PREFETCH: tl.constexpr,  # lines of 128 bytes of each weight row that are prefetched before the rows are available
    OVERLAP: tl.constexpr,
):
    """Computes one tile of weight rows and one part of the columns per program."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = split * part_len + tl.arange(0, BLOCK_K)
    w_at = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    u_at = weight + (n.to(tl.int64) + width)[:, None] * depth + k[None, :]  # used only when GATED
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    n_in, m_in = (n < width)[:, None], (m < rows)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    prefetch_lines(weight, n, width, depth, split * part_len, GATED, PREFETCH)
    grid_wait(OVERLAP)
    square = 0.0
    if PARTS:
        square = squares_of(squares, m, rows, parts, PARTS)
    added, gains = load_epilogue_operands(residual, gain, n, m, rows, width, RESIDUAL, AFTER, 0)
    for first in range(split * part_len, tl.minimum((split + 1) * part_len, depth), BLOCK_K):
        w_mask, x_mask = n_in, m_in
        if not EVEN:
            k_in = first + tl.arange(0, BLOCK_K) < depth
            w_mask, x_mask = n_in & k_in[None, :], m_in & k_in[:, None]
        tokens = tl.load(x_at, mask=x_mask, other=0.0)
        sums = tl.dot(tl.load(w_at, mask=w_mask, other=0.0), tokens, sums, input_precision="ieee")
        if GATED:
            ups = tl.dot(tl.load(u_at, mask=w_mask, other=0.0), tokens, ups, input_precision="ieee")
            u_at += BLOCK_K
        w_at += BLOCK_K
        x_at += BLOCK_K
    last = True
    if SPLITS > 1:
        size: tl.constexpr = BLOCK_N * BLOCK_M * (2 if GATED else 1)
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        mine = partial + (tile * SPLITS).to(tl.int64) * size + place
        tl.store(mine + split * size, sums)
        if GATED:
            tl.store(mine + split * size + BLOCK_N * BLOCK_M, ups)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):  # all loads are issued at once
                sums += tl.load(mine + part * size, cache_modifier=".cg")
                if GATED:
                    ups += tl.load(mine + part * size + BLOCK_N * BLOCK_M, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if last:
        finish(out, gained, counted, bias, added, gains, square, sums, ups, n, m, tile, rows, width, depth, eps,
               BIAS, RESIDUAL, GATED, ACT, PARTS, AFTER, 0)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def tiled_kernel(
    out,  # [rows, width]
    gained,  # [rows, width] out * gain when AFTER
    counted,  # [tiles of columns, rows] float32 when AFTER
    partial,  # [tiles of rows, tiles of columns, SPLITS, BLOCK_M, BLOCK_N or twice that] float32 when SPLITS > 1
    arrived,  # [MAX_TILES] int32 when SPLITS > 1; zero before and after
    x,  # [rows or more, depth] in blocks [BLOCK_M, BLOCK_K]
    weight,  # [width, depth] in blocks [BLOCK_N, BLOCK_K]; when GATED [2, width, depth] in blocks [2, BLOCK_N, BLOCK_K]
    plain,  # the weight's values
    bias,  # [width] or [2 * width] when BIAS
    residual,  # [rows, width] when RESIDUAL; may be out
    gain,  # [width] float32 when AFTER
    squares,  # [parts, rows] float32 when PARTS
    rows,
    width,
    depth,
    part_len,  # columns of a split, a multiple of BLOCK_K
    parts,
    eps,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    SPLITS: tl.constexpr,  # programs that share a tile
    PARTS: tl.constexpr,  # as above
    AFTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one tile of rows and columns and one part of the sums per program; a tile holds gate, then up."""
    tile, split = tl.program_id(1), tl.program_id(2)
    first_m, first_n = tl.program_id(0) * BLOCK_M, tile * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    start = split * part_len
    prefetch_lines(plain, n, width, depth, start, GATED, PREFETCH)
    grid_wait(OVERLAP)
    square = 0.0
    if PARTS:
        square = squares_of(squares, m, rows, parts, PARTS)
    wide: tl.constexpr = BLOCK_N * (2 if GATED else 1)
    sums = tl.zeros([BLOCK_M, wide], tl.float32)
    added, gains = load_epilogue_operands(residual, gain, n, m, rows, width, RESIDUAL, AFTER, 1)
    for k in tl.range(start, tl.minimum(start + part_len, depth), BLOCK_K):
        if GATED:
            block = weight.load([0, first_n, k]).reshape((wide, BLOCK_K))
        else:
            block = weight.load([first_n, k])
        sums = tl.dot(x.load([first_m, k]), block.T, sums, input_precision="ieee")
    last = True
    if SPLITS > 1:
        number = tl.program_id(0) * tl.num_programs(1) + tile
        size: tl.constexpr = BLOCK_M * wide
        mine = partial + (number * SPLITS).to(tl.int64) * size
        mine += tl.arange(0, BLOCK_M)[:, None] * wide + tl.arange(0, wide)[None, :]
        tl.store(mine + split * size, sums)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        last = tl.atomic_add(arrived + number, 1, sem="acq_rel") == SPLITS - 1
        if last:
            sums = tl.zeros([BLOCK_M, wide], tl.float32)
            for part in tl.static_range(SPLITS):  # all loads are issued at once
                sums += tl.load(mine + part * size, cache_modifier=".cg")
            tl.store(arrived + number, 0)
    if last:
        gate, up = sums, sums
        if GATED:
            gate, up = sums.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
        finish(out, gained, counted, bias, added, gains, square, gate, up, n, m, tile, rows, width, depth, eps,
               BIAS, RESIDUAL, GATED, ACT, PARTS, AFTER, 1)  # fmt: skip


def split_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: Activation | None,
    cut: Split,
    before: Unscaled | None = None,
    after: Unscaled | None = None,
) -> None:
    """x [M, K] with contiguous rows times weight [N, K] into out [M, N]; with an activation weight [2N, K], gate first.

    M <= 64, or the cut has block_m; then rows of x and weight must be 16-byte aligned (`is_aligned`). bias [N] (gated:
    [2N]); residual [M, N], contiguous, may be out itself. All tensors have the same dtype. With `before`, x is its
    rows. `after`, from `empty_unscaled`, gets the data for the norm of out. Can be captured after `arrivals` was called
    on the device.
    """
    launch = launch_split if x.is_cuda else split_linear_reference
    launch(x, weight, bias, residual, out, activation, cut, before, after)


def launch_split(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: Activation | None,
    cut: Split,
    before: Unscaled | None = None,
    after: Unscaled | None = None,
) -> None:
    """The Triton kernels; arguments as `split_linear`."""
    (rows, depth), width, gated = x.shape, out.shape[1], activation is not None
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    assert weight.shape == (2 * width if gated else width, depth), f"{tuple(weight.shape)} times {tuple(x.shape)}"
    assert after is None or (after.gain.shape == (width,) and after.rows.is_contiguous() and not gated)
    block_m = cut.block_m or padded(rows, 16)
    assert block_m <= MAX_BLOCK if cut.block_m else rows <= MAX_ROWS, f"{rows} rows cut {cut}"
    m_tiles, tiles, steps = (
        triton.cdiv(*pair) for pair in ((rows, block_m), (width, cut.block_n), (depth, cut.block_k))
    )
    part_len = triton.cdiv(steps, cut.splits) * cut.block_k
    splits = triton.cdiv(depth, part_len)  # none of them empty
    assert splits == 1 or m_tiles * tiles <= MAX_TILES
    partial = out
    if splits > 1:
        size = m_tiles * tiles * splits * block_m * cut.block_n * (2 if gated else 1)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    parts = 0 if before is None else len(before.squares)
    given: dict[str, Any] = dict(
        out=out, gained=out if after is None else after.rows, counted=out if after is None else after.squares,
        partial=partial, arrived=arrivals(x.device) if splits > 1 else out, bias=out if bias is None else bias,
        residual=out if residual is None else residual, gain=out if after is None else after.gain,
        squares=out if before is None else before.squares, rows=rows, width=width, depth=depth,
        part_len=part_len, parts=parts, eps=0.0 if before is None else before.eps,
        BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated, ACT=int(activation or 0), SPLITS=splits,
        PARTS=padded(parts, 1) if parts else 0, AFTER=after is not None,
        BLOCK_M=block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, PREFETCH=PREFETCH if overlaps() else 0,
        **launch_options(), num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if not cut.block_m:
        split_kernel[(tiles, splits)](x=x, weight=weight, x_stride=x.stride(0), EVEN=depth % cut.block_k == 0, **given)
        return
    assert is_aligned(x) and is_aligned(weight)
    blocks = (
        describe(weight.view(2, width, depth), 2, cut.block_n, cut.block_k)
        if gated
        else describe(weight, cut.block_n, cut.block_k)
    )
    tokens = describe(whole_tiles(x, block_m), block_m, cut.block_k)
    tiled_kernel[(m_tiles, tiles, splits)](x=tokens, weight=blocks, plain=weight, **given)


def split_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: Activation | None,
    cut: Split,
    before: Unscaled | None = None,
    after: Unscaled | None = None,
) -> None:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.to(wide)
    if before is not None:
        x = x * torch.rsqrt(before.squares.sum(0) / x.shape[1] + before.eps)[:, None]
    y = torch.nn.functional.linear(x, weight.to(wide), None if bias is None else bias.to(wide))
    if activation is not None:
        y = activate_reference(y, activation)
    out.copy_(y if residual is None else y + residual)
    if after is not None:
        after.rows.copy_(out.to(wide) * after.gain)
        after.squares.zero_()[0] = out.to(wide).square().sum(1)


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """Counters of finished programs per tile, [MAX_TILES] int32; zero between launches, so all launches share them.

    Launches that share the counters must be in sequence on one stream. The first call allocates, so it must precede any
    capture.
    """
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
