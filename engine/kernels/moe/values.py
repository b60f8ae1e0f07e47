"""Products of sorted pairs with 4-bit or 8-bit experts; scales multiply values: moe/coded's products on sm_90.

    w[n, k] = round((value(code[n, k]) - zero[n, k // group]) * scale[n, k // group])        row_scale[n] joins the sums

As in gemm/scaled_values, a tile has one accumulator for the whole depth, and the matrix units read values from
registers. Gate and up are rows of the same tile. The expert's words, and rows in sorted order, are read through tensor
descriptors; tokens' rows are gathered through pointers. Rows after an expert's last pair are computed with its tile but
not written. These products run only on NVIDIA's sm_90; moe/mxfp4 and moe/coded handle everything that `takes` refuses.
Users: moe/dispatch_codes.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.descriptors import describe, is_aligned
from engine.kernels.gemm.groups import KINDS, Packed
from engine.kernels.gemm.scaled_values import of_rows, scaled_of, wait_for_products
from engine.kernels.gemm.widen import codes_per_word
from engine.kernels.moe.grouped import Tile, pairs_of_tile, tile_of_experts
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton


@triton.jit
def of_columns(
    table, first_n, apart, height, groups, first, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Load a table's entries for column `first` and, if BLOCK_K is 128, for column first + 64: [ROWS, 1 or 2, 1]."""
    found = of_rows(table, first_n, apart, height, groups, tl.minimum(first // GROUP, groups - 1), ROWS)
    if BLOCK_K > 64 and GROUP % BLOCK_K != 0:
        others = of_rows(table, first_n, apart, height, groups, tl.minimum((first + 64) // GROUP, groups - 1), ROWS)
        found = tl.join(found, others).reshape((ROWS, 2))
    return found[:, :, None]


@triton.jit
def of_turn(
    table, first_n, apart, height, groups, first, HAS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load scales or zeros for columns 0, 16, 32 and 48 of each 64 from `first` on; 0 if there is no table."""
    e0 = 0
    if HAS:
        e0 = of_columns(table, first_n, apart, height, groups, first, GROUP, ROWS, BLOCK_K)
    e1, e2, e3 = e0, e0, e0
    if HAS and GROUP % 64 != 0:
        e2 = of_columns(table, first_n, apart, height, groups, first + 32, GROUP, ROWS, BLOCK_K)
        e3 = e2
        if GROUP % 32 != 0:
            e1 = of_columns(table, first_n, apart, height, groups, first + 16, GROUP, ROWS, BLOCK_K)
            e3 = of_columns(table, first_n, apart, height, groups, first + 48, GROUP, ROWS, BLOCK_K)
    return e0, e1, e2, e3


@triton.jit
def of_word(words):
    """Split words of two scales into the scales of the first 32 of each 64 columns and the scales of the other 32."""
    bits = words.to(tl.uint32, bitcast=True)[:, :, None]
    low = (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["pairs"])
def values_kernel(
    out,  # [pairs, width]: GATED: in sorted order, else by pair
    x,  # GATED: [tokens, depth]; else [pairs, depth] in sorted order, in blocks [BLOCK_M, BLOCK_K]
    words,  # gemm/widen's [experts, width, line] in blocks [1, ROWS, BLOCK_K / PER]; GATED [2 experts, ..] in [2, ..]
    scales,  # [experts * rows, groups] when SCALES
    zeros,  # [.., groups] int8 when ZEROS
    row_scales,  # [..] float32 when ROW_SCALES
    bias,  # [..] float32, or None
    weights,  # [pairs] float32 by pair, factors for the sums of gate and of up; or None
    order,  # [pairs] int32
    ends,  # [experts] int32
    pairs,
    experts,
    width,
    depth,
    groups,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    EXPERTS: tl.constexpr,  # power of two >= experts
    KIND: tl.constexpr,  # a kind of gemm/widen
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    PAIRED: tl.constexpr,  # a word holds the scales of 32 columns and of the next 32
    PAIRS: tl.constexpr,  # as in gemm/scaled_values
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a tile of the weight; GATED: half of them are gate's
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of an expert's pairs and rows per program."""
    COLUMNS: tl.constexpr = ROWS // 2 if GATED else ROWS  # columns of the result
    SIDES: tl.constexpr = 2 if GATED else 1
    PER: tl.constexpr = 4 if KIND < 3 else 2  # codes of a word
    grid_wait(OVERLAP)
    expert, first, end = tile_of_experts(ends, tl.program_id(1), experts, EXPERTS, BLOCK_M)
    if expert < experts:
        m_in, pair, source, target = pairs_of_tile(order, first, end, TOP_K, True, GATED, BLOCK_M)
        first_n = tl.program_id(0) * COLUMNS
        base_n = expert * SIDES * width + first_n
        apart, height = width if GATED else ROWS // 2, experts * SIDES * width
        k = tl.arange(0, BLOCK_K)
        x_at = source.to(tl.int64)[:, None] * depth
        sums = tl.zeros([ROWS, BLOCK_M], tl.float32)
        run = tl.arange(0, BLOCK_K // 64)
        if PAIRED:
            row = tl.arange(0, ROWS)
            n = base_n + row if ROWS == 64 else base_n + row % (ROWS // 2) + row // (ROWS // 2) * apart
            scale_at = scales + (tl.minimum(n, height - 1).to(tl.int64) * (groups // 2))[:, None] + run[None, :]
        for start in range(0, depth, BLOCK_K):
            # These loads are issued before the wait for the blocks.
            z0, z1, z2, z3 = of_turn(zeros, base_n, apart, height, groups, start, ZEROS, GROUP, ROWS, BLOCK_K)
            if PAIRED:  # pipelined loads, which bypass registers
                inside = (start // 64 + run < groups // 2)[None, :]
                s0, s2 = of_word(tl.load(scale_at + start // 64, mask=inside, other=0))
                s1, s3 = s0, s2
            else:
                s0, s1, s2, s3 = of_turn(scales, base_n, apart, height, groups, start, SCALES, GROUP, ROWS, BLOCK_K)
            block = words.load([expert * SIDES, first_n, start // PER]).reshape((ROWS, BLOCK_K // 64, 64 // PER))
            if GATED:  # rows are aligned to 16 bytes; Triton 3.6 loses this fact and would not pipeline loads
                at = tl.multiple_of(x + (x_at + (start + k)[None, :]), (1, 16))
                at = tl.max_contiguous(at, (1, BLOCK_K))
                x_in = m_in[:, None] if EVEN else m_in[:, None] & (start + k < depth)[None, :]
                tokens = tl.load(at, mask=x_in, other=0.0)
            else:
                tokens = x.load([first, start])
            dtype: tl.constexpr = tokens.dtype
            # A thread's codes do not move: only the names of its registers change.
            if PER == 4:
                v0 = scaled_of(block, s0, z0, dtype, 0, KIND, SCALES, ZEROS, PAIRS)
                v1 = scaled_of(block, s1, z1, dtype, 1, KIND, SCALES, ZEROS, PAIRS)
                v2 = scaled_of(block, s2, z2, dtype, 2, KIND, SCALES, ZEROS, PAIRS)
                v3 = scaled_of(block, s3, z3, dtype, 3, KIND, SCALES, ZEROS, PAIRS)
                values = tl.join(tl.join(v0, v1), tl.join(v2, v3)).permute((0, 1, 4, 3, 2)).reshape((ROWS, BLOCK_K))
            else:
                v0 = scaled_of(block, s0, z0, dtype, 0, KIND, SCALES, ZEROS, PAIRS)
                v1 = scaled_of(block, s2, z2, dtype, 1, KIND, SCALES, ZEROS, PAIRS)
                values = tl.join(v0, v1).permute((0, 1, 3, 2)).reshape((ROWS, BLOCK_K))
            sums = tl.dot(values, tokens.T, sums, input_precision="ieee")
            if PAIRS:
                wait_for_products()
        if ROW_SCALES:
            sums *= of_rows(row_scales, base_n, apart, height, 1, 0, ROWS)
        if weights is not None:
            sums *= tl.load(weights + pair, mask=m_in, other=0.0)[None, :]
        if bias is not None:
            sums += of_rows(bias, base_n, apart, height, 1, 0, ROWS)
        made = sums
        if GATED:
            gate, up = sums.reshape((2, COLUMNS, BLOCK_M)).permute((1, 2, 0)).split()
            made = activate(gate, up, ACT)
        column = first_n + tl.arange(0, COLUMNS)
        at = out + target.to(tl.int64)[None, :] * width + column[:, None]
        tl.store(at, made.to(out.dtype.element_ty), mask=(column < width)[:, None] & m_in[None, :])


def takes(x: Tensor, weight: Packed, pairs: Pairs) -> bool:
    """Whether this kernel computes the product of x, pairs and weight; no other place decides this."""
    return (
        pairs.order is not None
        and x.dtype is torch.bfloat16
        and target().arch == "sm_90"
        and weight.words
        and weight.group % (64 // codes_per_word(KINDS[weight.kind])) == 0
        and (weight.zeros is None or weight.zeros.dtype is torch.int8)
        and is_aligned(x)
        and is_aligned(weight.codes)
    )


def launch_values_product(
    x: Tensor, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    tile: Tile, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Like `launch_coded_product` of moe/coded, for sorted pairs and only if `takes` is true. Capturable."""
    assert pairs.order is not None and pairs.ends is not None
    depth, gated = weight.depth, activation is not None
    assert weights is None or (gated and weights.is_contiguous())
    sides = 2 if gated else 1
    width, line = len(weight.codes) // experts // sides, weight.codes.shape[1]
    assert x.is_contiguous() and x.shape[1] == depth and (bias is None or bias.dtype is torch.float32)
    out = x.new_empty(pairs.count, width)
    tiles = triton.cdiv(pairs.count, tile.block_m) + min(
        experts, pairs.count
    )  # an expert's last tile may be partly empty
    if pairs.count:
        words, scales = weight.codes.view(experts * sides, width, line), weight.scales
        paired = False
        if scales is not None and scales.dtype is torch.bfloat16 and weight.group == 32 and depth % 64 == 0:
            paired, scales = True, scales.view(torch.int32)
        values_kernel[(triton.cdiv(width, tile.block_n), tiles)](
            out, x if gated else describe(x, tile.block_m, tile.block_k),
            describe(words, sides, tile.block_n, tile.block_k // codes_per_word(KINDS[weight.kind])),
            out if scales is None else scales, out if weight.zeros is None else weight.zeros,
            out if weight.row_scales is None else weight.row_scales, bias, weights, pairs.order, pairs.ends,
            pairs.count, experts, width, depth, -(-depth // weight.group), TOP_K=pairs.top_k, GATED=gated,
            ACT=int(activation or 0), EXPERTS=triton.next_power_of_2(experts), KIND=KINDS[weight.kind],
            GROUP=weight.group, SCALES=weight.scales is not None, ZEROS=weight.zeros is not None,
            ROW_SCALES=weight.row_scales is not None, PAIRED=paired,
            PAIRS=x.is_cuda, EVEN=depth % tile.block_k == 0,
            BLOCK_M=tile.block_m, ROWS=tile.block_n * sides, BLOCK_K=tile.block_k, num_warps=tile.warps,
            num_stages=tile.stages, **launch_options(),
        )  # fmt: skip
    return out


def values_tile(each: float, gated: bool) -> Tile:
    """Choose the tile for an average of `each` pairs per expert, if moe/tiles has no line for the form."""
    block_m = 16 if each <= 8 else 32 if each <= 16 else 64 if each <= 64 else 128
    return Tile(block_m, 64 if gated else 128, 64 if gated and block_m > 32 else 128, 3, 4, values=True)
