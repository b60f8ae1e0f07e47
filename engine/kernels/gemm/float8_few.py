"""Products of few rows of FP8 codes with FP8 codes: gemm/float8 with descriptors.

    rows     y[m, n] = s_x[m] s_w[n] sum_k x[m, k] w[n, k] (+ bias) (+ residual)
    blocks   y[m, n] = sum_b s_x[b, m] s_w[n / 128, b] sum_(k in b) x[m, k] w[n, k]      b: 128 columns

Up to 64 rows the time is spent on reading the weight. Descriptors load whole blocks, without masks or addresses, and
several iterations of two blocks are in flight. The units add 128 columns before float32 does, as in gemm/float8. The
columns may be divided into parts; the program that arrives last adds up the parts.
A program's weight rows are in one block, so blocks add one scale per 128 columns, loaded an iteration before its use.
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
from engine.kernels.gemm.float8_library import FOUR
from engine.kernels.gemm.groups import Packed, Tile
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

MOST_ROWS = 64
WIDTH = 64  # rows of a block of weights, which has BLOCK columns
TURN = 2 * BLOCK
LONG, LARGE = 4096, 1 << 26  # one row too is multiplied here if a weight has more columns, and so many codes
LEAST_PART = 1024  # least columns of a part; twice as many are not divided


@triton.jit
def factors(scales, x_scales, group, groups, m, rows):
    """Scales of a group of 128 columns: those of x's rows times the weight's [BLOCK_M]."""
    there = group < groups
    weight = tl.load(scales + group, mask=there, other=0.0)
    return weight * tl.load(x_scales + group * rows + m, mask=there & (m < rows), other=0.0)


@triton.jit(do_not_specialize=["rows"])
def float8_few_kernel(
    out,  # [rows, width]
    partial,  # [tiles, PARTS, BLOCK_N, BLOCK_M] float32 when PARTS > 1
    arrived,  # [MAX_TILES] int32 when PARTS > 1; zero before and after
    x,  # a descriptor of [rows, depth] codes in blocks [BLOCK_M, BLOCK_K]
    x_scales,  # [rows] float32; BLOCKED: [groups, rows]
    codes,  # a descriptor of [width, depth] in blocks [BLOCK_N, BLOCK_K]
    scales,  # [width] float32; BLOCKED: [width / 128, groups], lines scale_line apart
    bias,  # [width] float32, or None
    residual,  # [rows, width], or None; may be out
    rows,
    width,
    depth,
    part_len,
    scale_line,
    BLOCKED: tl.constexpr,
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
    by_row = tl.zeros([BLOCK_N], tl.float32)
    if not BLOCKED:
        by_row = tl.load(scales + n, mask=n_in, other=0.0)
    grid_wait(OVERLAP)
    start = part * part_len
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if BLOCKED:
        scales += first_n // BLOCK_K * scale_line
        groups, group = tl.cdiv(depth, BLOCK_K), start // BLOCK_K
        one = factors(scales, x_scales, group, groups, m, rows)
        two = factors(scales, x_scales, group + 1, groups, m, rows)
        for first in range(start, tl.minimum(start + part_len, depth), 2 * BLOCK_K):
            group += 2
            next_one = factors(scales, x_scales, group, groups, m, rows)
            next_two = factors(scales, x_scales, group + 1, groups, m, rows)
            total += tl.dot(codes.load([first_n, first]), x.load([0, first]).T) * one[None, :]
            total += tl.dot(codes.load([first_n, first + BLOCK_K]), x.load([0, first + BLOCK_K]).T) * two[None, :]
            one, two = next_one, next_two
    else:
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
        if not BLOCKED:
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
        and (weight.scales is None or weight.blocks is not None)
        and is_aligned(x)
        and is_aligned(weight.codes)
    )


def takes_alone(x: Tensor, weight: Packed) -> bool:
    """Whether the kernel multiplies one row of codes faster than gemm/float8_row: measured on an H200."""
    long = weight.blocks is not None and weight.depth > LONG and len(weight.codes) * weight.depth >= LARGE
    return len(x) == 1 and long and takes(x, weight)


def few_tile_of(rows: int, width: int, depth: int) -> Tile:
    """The fastest tile, or nearly, of those tried with products of Qwen3-8B, 3.5-27B and 3.6-35B-A3B on an H200.

    A unit has places for two programs of four stages or three of three, above 32 rows for one or two. Parts and stages
    are those that leave the fewest places free. If there are more tiles than places, tiles have one part.
    """
    block_m, tiles = 16 if rows <= 16 else 32 if rows <= 32 else 64, triton.cdiv(width, WIDTH)
    most, best, fullest = depth // LEAST_PART if depth > 2 * LEAST_PART else 1, (3, 1), 0.0
    for stages, programs in ((4, 2), (3, 3)) if rows <= 32 else ((4, 1), (3, 2)):
        places = programs * target().num_units
        parts = max(1, min(places // tiles, most))
        if fullest < tiles * parts / places <= 1.0:
            best, fullest = (stages, parts), tiles * parts / places
    stages, parts = best
    return Tile(block_m, WIDTH, BLOCK, triton.cdiv(triton.cdiv(depth, parts), TURN) * TURN, stages, 4)


def float8_few_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: Tile
) -> None:
    """Arguments as `float8_product`; scales per row, or per 128 columns of x and block of the weight."""
    product = launch_float8_few_product if x.is_cuda else float8_product_reference
    product(x, x_scales, weight, bias, residual, out, tile)


def launch_float8_few_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: Tile
) -> None:
    """The Triton kernel; arguments as `float8_few_product`."""
    (rows, depth), width, blocked = x.shape, len(weight.codes), weight.blocks is not None
    scales, groups = (weight.blocks, -(-depth // BLOCK)) if blocked else (weight.row_scales, 1)
    assert x.is_contiguous() and x_scales.is_contiguous() and out.is_contiguous() and out.shape == (rows, width)
    assert depth == weight.depth, f"x has {depth} features; this layer takes {weight.depth}"
    assert scales is not None and x_scales.numel() == groups * rows
    assert scales.shape == (width // BLOCK, -(-groups // FOUR) * FOUR) if blocked else scales.numel() == width
    assert blocked or weight.scales is None
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
        depth, tile.part_len, scales.stride(0), BLOCKED=blocked, PARTS=parts, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps, num_stages=tile.stages, **launch_options(),
    )  # fmt: skip
