"""Products of FP8 codes with FP8 codes: y = (x W^T) scaled (+ bias) (+ residual), both e4m3.

    rows     y[m, n] = s_x[m] s_w[n] sum_k x[m, k] w[n, k]
    blocks   y[m, n] = sum_b s_x[b, m] s_w[n, b] sum_(k in b) x[m, k] w[n, k]       b: 128 columns

The matrix units add 128 columns, and these sums are added in float32, because FP8 units of sm_90 have only about 14
bits per sum. If the units do not support e4m3, codes are widened to float16, which is exact. The division of columns
into parts depends only on the weight's shape, as in gemm/groups. With few rows each part is a separate program, and the
program that arrives last adds up the parts.
Users: gemm/dispatch_float8.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.epilogue import scaled_plus
from engine.kernels.gemm.groups import UNITS, Packed, Tile
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.widen import E4M3, widened
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

BLOCK = 128  # columns that the units add; also the columns of a block of scales


@triton.jit(do_not_specialize=["rows"])
def float8_kernel(
    out,  # [rows, width]
    partial,  # [tiles, parts, BLOCK_N, BLOCK_M] float32 when APART
    arrived,  # [MAX_TILES] int32 when APART; zero before and after
    x,  # [rows, depth] codes
    x_scales,  # [groups, rows] float32
    codes,  # [width, depth]
    scales,  # [width, groups]
    bias,  # [width] when BIAS
    residual,  # [rows, width] when RESIDUAL; may be out
    rows,
    width,
    depth,
    groups,  # groups of BLOCK_K columns when BLOCKED, else 1
    parts,
    part_len,
    BLOCKED: tl.constexpr,
    NATIVE: tl.constexpr,  # the matrix units take e4m3
    KIND: tl.constexpr,  # e4m3's number in gemm/widen
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    APART: tl.constexpr,  # one part per program
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one tile per program, all parts or one part; neighbouring programs read the same weights."""
    program, m_tiles = tl.program_id(0), tl.cdiv(rows, BLOCK_M)
    n = program // m_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = program % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n_in, m_in = n < width, m < rows
    code_line = codes + n.to(tl.int64)[:, None] * depth + k[None, :]
    x_line = x + m.to(tl.int64)[None, :] * depth + k[:, None]
    scale_line = scales + n.to(tl.int64) * groups
    first_part = tl.program_id(1)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    grid_wait(OVERLAP)
    for part in range(first_part, first_part + 1 if APART else parts):
        start = part * part_len
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(start, tl.minimum(start + part_len, depth), BLOCK_K):
            k_in = first + k < depth
            values = tl.load(code_line + first, mask=n_in[:, None] & k_in[None, :], other=0)
            tokens = tl.load(x_line + first, mask=m_in[None, :] & k_in[:, None], other=0)
            if NATIVE:
                product = tl.dot(values.to(tl.float8e4nv, bitcast=True), tokens.to(tl.float8e4nv, bitcast=True))
            else:
                product = tl.dot(widened(values, KIND).to(tl.float16), widened(tokens, KIND).to(tl.float16))
            if BLOCKED:
                group = first // BLOCK_K
                product *= tl.load(scale_line + group, mask=n_in, other=0.0).to(tl.float32)[:, None]
                product *= tl.load(x_scales + group * rows + m, mask=m_in, other=0.0)[None, :]
            sums += product
        total += sums
    last = True
    if APART:
        size: tl.constexpr = BLOCK_N * BLOCK_M
        mine = partial + (program * parts).to(tl.int64) * size
        mine += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(mine + first_part * size, total, mask=m_in[None, :])
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        last = tl.atomic_add(arrived + program, 1, sem="acq_rel") == parts - 1
        if last:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in range(parts):
                total += tl.load(mine + part * size, mask=m_in[None, :], other=0.0, cache_modifier=".cg")
            tl.store(arrived + program, 0)
    if last:
        scale = tl.full([1, BLOCK_M], 1.0, tl.float32)
        if not BLOCKED:
            total *= tl.load(scales + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
            scale = tl.load(x_scales + m, mask=m_in, other=0.0)[None, :]
        added = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if BIAS:
            added += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
        inside = n_in[:, None] & m_in[None, :]
        at = m.to(tl.int64)[None, :] * width + n[:, None]
        if RESIDUAL:
            added += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        total = scaled_plus(total, scale, added)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def float8_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: Tile
) -> None:
    """Codes x [M, K] and x_scales [groups, M] times the weight [N, K] into out [M, N]; residual [M, N], may be out.

    The weight is E4M3 with a scale per row or per 128 columns of a row, and x has a scale per row or per 128 columns.
    Can be captured after `arrivals` was called on the device.
    """
    if x.is_cuda:
        launch_float8_product(x, x_scales, weight, bias, residual, out, tile, target().multiplies_float8)
    else:
        float8_product_reference(x, x_scales, weight, bias, residual, out, tile)


def launch_float8_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: Tile,
    native: bool,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as `float8_product`."""
    (rows, depth), width, blocked = x.shape, len(weight.codes), weight.scales is not None
    scales = weight.row_scales if weight.scales is None else weight.scales
    assert x.is_contiguous() and x_scales.is_contiguous() and out.is_contiguous() and out.shape == (rows, width)
    assert scales is not None and (blocked == (weight.row_scales is None)) and tile.block_k == BLOCK
    assert depth == weight.depth, f"x has {depth} features; this layer takes {weight.depth}"
    groups = -(-depth // BLOCK) if blocked else 1
    assert x_scales.shape == (groups, rows) and scales.numel() == width * groups and tile.part_len % BLOCK == 0
    if rows == 0:
        return
    tiles, parts = triton.cdiv(rows, tile.block_m) * triton.cdiv(width, tile.block_n), -(-depth // tile.part_len)
    apart = parts > 1 and tiles < UNITS
    partial = out
    if apart:
        size = tiles * parts * tile.block_m * tile.block_n
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    float8_kernel[(tiles, parts if apart else 1)](
        out, partial, arrivals(x.device) if apart else out, x, x_scales, weight.codes, scales,
        out if bias is None else bias, out if residual is None else residual, rows, width, depth, groups, parts,
        tile.part_len, BLOCKED=blocked, NATIVE=native, KIND=E4M3, BIAS=bias is not None, RESIDUAL=residual is not None,
        APART=apart, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps,
        num_stages=tile.stages, **launch_options(),
    )  # fmt: skip


def tile_of(rows: int | None, width: int, depth: int, stages: int) -> Tile:
    """The tile for `rows` rows; None: for any number, with --deterministic."""
    if rows is not None and rows > 64:
        return Tile(128, 128, BLOCK, triton.cdiv(depth, BLOCK) * BLOCK, stages, 8)
    block_m = 64 if rows is None or rows > 32 else 32 if rows > 16 else 16
    parts = max(1, min(-(-UNITS // triton.cdiv(width, 64)), depth // 512))
    part_len = triton.cdiv(triton.cdiv(depth, parts), BLOCK) * BLOCK
    return Tile(block_m, 64, BLOCK, part_len, stages, 4)


def float8_product_reference(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: Tile
) -> None:
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    scale = x_scales.to(wide).t().repeat_interleave(BLOCK if len(x_scales) > 1 else x.shape[1], 1)[:, : x.shape[1]]
    y = torch.nn.functional.linear(x.view(torch.float8_e4m3fn).to(wide) * scale, weight.dense().to(wide))
    for added in (bias, residual):
        if added is not None:
            y = y + added
    out.copy_(y)
