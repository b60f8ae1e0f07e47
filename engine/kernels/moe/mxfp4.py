"""Experts in MXFP4: moe/coded for codes in which 32 columns of a row share a scale, a power of two.

    w[n, k] = value(code[n, k]) * scale[n, k // 32]        exact in bfloat16

An iteration of the loop reads 64 columns of each row: 16 words of codes (gemm/widen) and two scales in one 32-bit word.
So all loads are pipelined, and bypass registers if the units can do so. Gate and up are rows of the same tile. The
scales multiply values, because separate sums for each group would wait for the matrix units.

The pairs of a single row use no tiles (moe/pairs). For a few more pairs there are too few tiles to keep the memory
busy: a row of gpt-oss-20b has only 11 KB in flight to each unit of an H100. Then several programs share a tile's
columns, as in gemm/split_k: the last program to arrive adds all sums, in order.
Users: moe/dispatch_codes.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.codes import Kind
from engine.kernels.gemm.groups import Packed, makes_pairs
from engine.kernels.gemm.split_k import MAX_TILES, arrivals
from engine.kernels.gemm.widen import BLOCK, values_of
from engine.kernels.moe.grouped import Tile, expert_of_tile, grouped_reference, pairs_of_tile
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import Target, tl, triton

GROUP = 32  # columns that share a scale
# Two bfloat16 times two others; -0 is added.
TIMES = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")


@triton.jit
def scaled_values(words, scales, dtype: tl.constexpr, PLACE: tl.constexpr, PAIRS: tl.constexpr):
    """Code PLACE of each word [N, 16], times its scale: int32 that holds two bfloat16, the lower column in the low
    half."""
    values = values_of(words, dtype, 1, PLACE, PAIRS)
    bits = scales.to(tl.uint32, bitcast=True)
    mine = bits >> 16 if PLACE > 1 else bits & 0xFFFF
    if PAIRS:
        values = tl.inline_asm_elementwise(
            TIMES, "=r,r,r,r", [values, mine | (mine << 16)], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        values = (values.to(tl.float32) * (mine << 16).to(tl.float32, bitcast=True)).to(dtype)
    return values


@triton.jit(do_not_specialize=["pairs"])
def mxfp4_kernel(
    out,  # [pairs, width]: in sorted order with GATHER, else by pair
    x,  # GATHER: [tokens, depth]; else [pairs, depth] in sorted order
    codes,  # words of gemm/widen [experts * width, depth / 4]; when GATED [experts * 2 * width, depth / 4]
    scales,  # [.., depth / 64] int32: of 32 columns and of the next 32
    bias,  # [..] float32, or None
    weights,  # [pairs] float32 by pair, factors for the sums of gate and of up; or None
    order,  # [pairs] int32 when SORTED
    ends,  # SORTED: [experts] int32; else [pairs] the experts
    partial,  # [tiles, SPLITS, BLOCK_M, rows of a tile] float32 when SPLITS > 1
    arrived,  # [MAX_TILES] int32 when SPLITS > 1; zero before and after
    pairs,
    experts,
    width,
    depth,
    TOP_K: tl.constexpr,
    SORTED: tl.constexpr,  # else each pair is a tile
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    EXPERTS: tl.constexpr,  # power of two >= experts
    PAIRS: tl.constexpr,  # as in gemm/code_sums
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of an expert's pairs and rows per program."""
    grid_wait(OVERLAP)
    expert, first, end = expert_of_tile(ends, tl.program_id(1), experts, SORTED, EXPERTS, BLOCK_M)
    if expert < experts:
        m_in, pair, source, target = pairs_of_tile(order, first, end, TOP_K, SORTED, GATHER, BLOCK_M)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        # GATED: a tile has rows of gate, followed by as many rows of up.
        row = tl.arange(0, BLOCK_N * (2 if GATED else 1))
        of_piece = tl.program_id(0) * BLOCK_N + row % BLOCK_N
        row_in = (of_piece < width)[:, None]
        n = (expert * (2 if GATED else 1) + row // BLOCK_N).to(tl.int64) * width + of_piece
        j, runs = tl.arange(0, 16), depth // 64
        begin, behind = 0, runs
        if SPLITS > 1:
            begin, behind = tl.program_id(2) * runs // SPLITS, (tl.program_id(2) + 1) * runs // SPLITS
        code_at = codes + n[:, None] * (depth // 4) + begin * 16 + j[None, :]
        scale_at = scales + (n * runs + begin)[:, None]
        x_at = x + source.to(tl.int64)[None, :] * depth + begin * 64 + j[:, None]
        sums = tl.zeros([BLOCK_N * (2 if GATED else 1), BLOCK_M], tl.float32)
        dtype: tl.constexpr = x.dtype.element_ty
        for _ in range(begin, behind):
            words = tl.load(code_at, mask=row_in, other=0)
            scale = tl.load(scale_at, mask=row_in, other=0)
            for which in tl.static_range(4):
                tokens = tl.load(x_at + which * 16, mask=m_in[None, :], other=0.0)
                values = scaled_values(words, scale, dtype, which, PAIRS)
                sums = tl.dot(values, tokens, sums, input_precision="ieee")
            code_at += 16
            scale_at += 1
            x_at += 64
        last = True
        if SPLITS > 1:
            rows: tl.constexpr = BLOCK_N * (2 if GATED else 1)
            tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            place = tl.arange(0, BLOCK_M)[None, :] * rows + row[:, None]
            mine = partial + (tile * SPLITS).to(tl.int64) * (rows * BLOCK_M) + place
            tl.store(mine + tl.program_id(2) * (rows * BLOCK_M), sums, mask=m_in[None, :])
            tl.debug_barrier()  # every thread's part is written before the arrival is counted
            last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
            if last:
                sums = tl.zeros([rows, BLOCK_M], tl.float32)
                for part in tl.static_range(SPLITS):  # all loads are issued at once
                    sums += tl.load(mine + part * (rows * BLOCK_M), mask=m_in[None, :], other=0.0, cache_modifier=".cg")
                tl.store(arrived + tile, 0)
        if last:
            if weights is not None:
                sums *= tl.load(weights + pair, mask=m_in, other=0.0)[None, :]
            if bias is not None:
                sums += tl.load(bias + n[:, None], mask=row_in, other=0.0)
            made = sums
            if GATED:
                gate, up = tl.split(sums.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0))
                made = activate(gate, up, ACT)
            n_in = column < width
            at = out + target.to(tl.int64)[None, :] * width + column[:, None]
            tl.store(at, made.to(out.dtype.element_ty), mask=n_in[:, None] & m_in[None, :])


def is_mxfp4(weight: Packed) -> bool:
    """Whether the kernel reads these codes: they have only group scales, two in a word."""
    alone = weight.row_scales is None and weight.zeros is None
    whole = weight.group == GROUP and weight.depth % BLOCK == 0 and weight.words
    return (
        weight.kind is Kind.E2M1
        and whole
        and alone
        and weight.scales is not None
        and (weight.scales.dtype is torch.bfloat16)
    )


def launch_mxfp4_product(
    x: Tensor, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    tile: Tile, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Like moe/grouped's product, with codes [E * N, K]; with an activation [E * 2N, K], gate first in each expert."""
    depth, gated = weight.depth, activation is not None
    assert weights is None or (gated and weights.is_contiguous())
    width = len(weight.codes) // experts // (2 if gated else 1)
    assert x.is_contiguous() and x.shape[1] == depth and (bias is None or bias.dtype is torch.float32)
    assert is_mxfp4(weight) and weight.scales is not None
    out = x.new_empty(pairs.count, width)
    blocks, tiles, splits = triton.cdiv(width, tile.block_n), pairs.count, min(tile.splits, depth // BLOCK)
    if pairs.order is not None:  # every expert's last tile may be partly empty
        tiles, splits = triton.cdiv(pairs.count, tile.block_m) + min(experts, pairs.count), 1
    partial = out
    if splits > 1:
        assert blocks * tiles <= MAX_TILES
        size = blocks * tiles * splits * tile.block_m * tile.block_n * (2 if gated else 1)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    if pairs.count:
        mxfp4_kernel[(blocks, tiles, splits)](
            out, x, weight.codes, weight.scales.view(torch.int32), bias, weights,
            pairs.chosen if pairs.order is None else pairs.order, pairs.chosen if pairs.ends is None else pairs.ends,
            partial, arrivals(x.device) if splits > 1 else out, pairs.count, experts, width, depth,
            TOP_K=pairs.top_k, SORTED=pairs.order is not None, GATHER=gated, GATED=gated, ACT=int(activation or 0),
            EXPERTS=triton.next_power_of_2(experts), PAIRS=makes_pairs(x), SPLITS=splits, BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n, num_warps=tile.warps, num_stages=tile.stages,
            **launch_options(),
        )  # fmt: skip
    return out


def mxfp4_product_reference(
    x: Tensor, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    tile: Tile, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return grouped_reference(x, weight.dense().view(experts, -1, weight.depth), bias, pairs, activation, weights)


def mxfp4_tile(device: Target, each: float, size: int, gated: bool) -> Tile:
    """Choose the tile for `each` pairs per expert (0: pairs are not sorted) and `size` bytes per value.

    Each tile is the fastest that was measured on an H100 in gpt-oss-20b's layers. The exception is `splits`, the number
    of programs that share a tile: it is chosen to fill the units. Many pairs share the values that a tile has widened.
    """
    stages = 3 if device.loads_past_registers else 2
    if not each and not gated and device.loads_past_registers:  # 23 us for one row; the next best tile 28
        tile = Tile(8, 32, 64, 5, 2, splits=3)
    elif not each:
        tile = Tile(16, 64, 64, stages, 4, splits=4)
    elif each <= 16:
        tile = Tile(16, 64, 64, stages, 4)
    elif each <= 48 or size > 2:
        tile = Tile(64, 64, 64, stages, 4)
    else:
        tile = Tile(128, 64 if gated else 128, 64, stages, 8)
    return tile
