"""Products of few rows of FP8 codes with FP8 codes, with scales per row: gemm/float8 with descriptors.

    y[m, n] = s_x[m] s_w[n] sum_k x[m, k] w[n, k] (+ bias) (+ residual)

Up to 64 rows the time is spent on reading the weight. Descriptors load whole blocks, without masks or addresses, and
several iterations of two blocks are in flight. The units add 128 columns before float32 does, as in gemm/float8, and
the division of columns into parts depends only on the weight's shape; the program that arrives last adds up the parts.
On an H100 a layer of Qwen3-8B with 16, 32 and 64 rows took 89, 95 and 104 us with these loads and one product per
iteration; gemm/float8 takes 111, 118 and 126.
Users: gemm/dispatch_float8.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.descriptors import describe, is_aligned
from engine.kernels.gemm.float8 import BLOCK, float8_product_reference
from engine.kernels.gemm.groups import UNITS, Packed, Tile
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

MOST_ROWS = 64
WIDTH = 64  # rows of a block of weights, which has BLOCK columns
TURN = 2 * BLOCK
LEAST_PART = 2048  # least columns of a part


@triton.jit(do_not_specialize=["rows"])
def float8_few_kernel(
    out,  # [rows, width]
    partial,  # [tiles, PARTS, BLOCK_N, BLOCK_M] float32 when PARTS > 1
    arrived,  # [MAX_TILES] int32 when PARTS > 1; zero before and after
    x,  # a descriptor of [rows, depth] codes in blocks [BLOCK_M, BLOCK_K]
    x_scales,  # [rows] float32
    codes,  # a descriptor of [width, depth] in blocks [BLOCK_N, BLOCK_K]
    scales,  # [width] float32
    bias,  # [width] float32, or None
    residual,  # [rows, width], or None; may be out
    rows,
    width,
    depth,
    part_len,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One part of a tile per program."""
    program, part = tl.program_id(0), tl.program_id(1)
    first_n = program * BLOCK_N
    n, m = first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    n_in, m_in = n < width, m < rows
    by_row = tl.load(scales + n, mask=n_in, other=0.0)
    grid_wait(OVERLAP)
    start = part * part_len
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(start, tl.minimum(start + part_len, depth), 2 * BLOCK_K):
        total += tl.dot(codes.load([first_n, first]), x.load([0, first]).T)
        total += tl.dot(codes.load([first_n, first + BLOCK_K]), x.load([0, first + BLOCK_K]).T)
    last = True
    if PARTS > 1:
        size: tl.constexpr = BLOCK_N * BLOCK_M
        mine = partial + (program * PARTS).to(tl.int64) * size
        mine += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(mine + part * size, total)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        last = tl.atomic_add(arrived + program, 1, sem="acq_rel") == PARTS - 1
        if last:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for each in tl.static_range(PARTS):
                total += tl.load(mine + each * size, cache_modifier=".cg")
            tl.store(arrived + program, 0)
    if last:
        total *= by_row[:, None] * tl.load(x_scales + m, mask=m_in, other=0.0)[None, :]
        if bias is not None:
            total += tl.load(bias + n, mask=n_in, other=0.0)[:, None]
        inside = n_in[:, None] & m_in[None, :]
        at = m.to(tl.int64)[None, :] * width + n[:, None]
        if residual is not None:
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def takes(x: Tensor, weight: Packed) -> bool:
    """Whether the kernel multiplies these codes x [M, K]."""
    return (
        len(x) <= MOST_ROWS
        and target().arch == "sm_90"
        and weight.scales is None
        and is_aligned(x)
        and is_aligned(weight.codes)
    )


def few_tile_of(rows: int, width: int, depth: int) -> Tile:
    """The fastest tile, or nearly, of those tried with Qwen3-8B's products on an H100."""
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    parts = max(1, min(UNITS // triton.cdiv(width, WIDTH), depth // LEAST_PART))
    part_len = triton.cdiv(triton.cdiv(depth, parts), TURN) * TURN
    return Tile(block_m, WIDTH, BLOCK, part_len, 3 if parts == 1 or rows > 32 else 4, 4)


def float8_few_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: Tile
) -> None:
    """Arguments as `float8_product`; both operands have a scale per row."""
    product = launch_float8_few_product if x.is_cuda else float8_product_reference
    product(x, x_scales, weight, bias, residual, out, tile)


def launch_float8_few_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: Tile
) -> None:
    """The Triton kernel; arguments as `float8_few_product`."""
    (rows, depth), width, scales = x.shape, len(weight.codes), weight.row_scales
    assert x.is_contiguous() and x_scales.is_contiguous() and out.is_contiguous() and out.shape == (rows, width)
    assert depth == weight.depth, f"x has {depth} features; this layer takes {weight.depth}"
    assert scales is not None and weight.scales is None and scales.numel() == width and x_scales.numel() == rows
    assert rows <= tile.block_m and tile.part_len % TURN == 0 and (bias is None or bias.dtype is torch.float32)
    if rows == 0:
        return
    tiles, parts, e4m3 = triton.cdiv(width, tile.block_n), -(-depth // tile.part_len), torch.float8_e4m3fn
    partial = out
    if parts > 1:
        partial = torch.empty(tiles * parts * tile.block_m * tile.block_n, dtype=torch.float32, device=x.device)
    float8_few_kernel[(tiles, parts)](  # descriptors pass by value, so a graph holds them
        out, partial, arrivals(x.device) if parts > 1 else out, describe(x.view(e4m3), tile.block_m, tile.block_k),
        x_scales, describe(weight.codes.view(e4m3), tile.block_n, tile.block_k), scales, bias, residual, rows, width,
        depth, tile.part_len, PARTS=parts, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, num_warps=tile.warps, num_stages=tile.stages, **launch_options(),
    )  # fmt: skip
