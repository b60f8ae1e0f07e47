"""Experts of an accelerator with 4-bit or 8-bit codes: moe/grouped with matrices that are widened in registers.

The codes of all experts of a layer are one matrix [E * N, K], in the forms of gemm/groups. Tiles of pairs and rows are
those of moe/grouped; in a gated product a program sums gate, then up. The kernel supports every kind of codes;
moe/dispatch_codes names the products with specialised kernels. Users: moe/dispatch_codes.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.code_sums import block_k_of, code_sums, scales_sums
from engine.kernels.gemm.codes import Kind
from engine.kernels.gemm.groups import KINDS, Packed, makes_pairs
from engine.kernels.moe.grouped import Tile, expert_of_tile, grouped_reference, pairs_of_tile, wait_for_experts
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import launch_options
from engine.kernels.target import Target, tl, triton


@triton.jit(do_not_specialize=["pairs"])
def coded_kernel(
    out,  # [pairs, width]: in sorted order with GATHER, else by pair
    x,  # GATHER: [tokens, depth]; else [pairs, depth] in sorted order
    codes,  # words of gemm/widen [experts * width, line]; when GATED [experts * 2 * width, line]
    scales,  # [.., groups] when SCALES
    zeros,  # [.., groups] int8 when ZEROS
    row_scales,  # [..] float32 when ROW_SCALES
    bias,  # [..] float32, or None
    weights,  # [pairs] float32 by pair, factors of the sums of gate and of up; or None
    order,  # [pairs] int32 when SORTED
    ends,  # SORTED: [experts] int32, the end of each expert's pairs; else [pairs], the experts
    pairs,
    experts,
    width,
    depth,
    line,
    groups,
    TOP_K: tl.constexpr,
    SORTED: tl.constexpr,  # pairs are sorted by expert; else each pair is a tile
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    EXPERTS: tl.constexpr,  # power of two >= experts
    KIND: tl.constexpr,  # a kind of gemm/widen
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    ON_SUMS: tl.constexpr,  # as in gemm/code_sums, like PAIRS and EVEN
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one tile of an expert's pairs and rows per program."""
    wait_for_experts(SORTED, GATED, OVERLAP)
    expert, first, end = expert_of_tile(ends, tl.program_id(1), experts, SORTED, EXPERTS, BLOCK_M)
    if expert < experts:
        m_in, pair, source, target = pairs_of_tile(order, first, end, TOP_K, SORTED, GATHER, BLOCK_M)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in = column < width
        n = expert * width * (2 if GATED else 1) + column
        sums = code_sums(n, n_in, source, m_in, x, codes, scales, zeros, 0, depth, depth, line, groups, depth, KIND,
                         GROUP, SCALES, ZEROS, ON_SUMS, PAIRS, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        if ROW_SCALES:
            sums *= tl.load(row_scales + n, mask=n_in, other=0.0)[:, None]
        if weights is not None:
            sums *= tl.load(weights + pair, mask=m_in, other=0.0)[None, :]
        if bias is not None:
            sums += tl.load(bias + n, mask=n_in, other=0.0)[:, None]
        if GATED:
            n += width
            ups = code_sums(n, n_in, source, m_in, x, codes, scales, zeros, 0, depth, depth, line, groups, depth, KIND,
                            GROUP, SCALES, ZEROS, ON_SUMS, PAIRS, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
            if ROW_SCALES:
                ups *= tl.load(row_scales + n, mask=n_in, other=0.0)[:, None]
            if weights is not None:
                ups *= tl.load(weights + pair, mask=m_in, other=0.0)[None, :]
            if bias is not None:
                ups += tl.load(bias + n, mask=n_in, other=0.0)[:, None]
            sums = activate(sums, ups, ACT)
        at = out + target.to(tl.int64)[None, :] * width + column[:, None]
        tl.store(at, sums.to(out.dtype.element_ty), mask=n_in[:, None] & m_in[None, :])


def launch_coded_product(
    x: Tensor, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    tile: Tile, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As moe/grouped's product, with codes [E * N, K], or with an activation [E * 2N, K], gate first in each expert.

    weights: float32 [T, top_k], factors of each pair's input, as in moe/grouped.
    """
    depth, gated = weight.depth, activation is not None
    assert weights is None or (gated and weights.is_contiguous())
    width = len(weight.codes) // experts // (2 if gated else 1)
    assert x.is_contiguous() and x.shape[1] == depth and (bias is None or bias.dtype is torch.float32)
    out = x.new_empty(pairs.count, width)
    tiles = pairs.count
    if pairs.order is not None:  # every expert's last tile may be partly empty
        tiles = triton.cdiv(pairs.count, tile.block_m) + min(experts, pairs.count)
    if pairs.count:
        coded_kernel[(triton.cdiv(width, tile.block_n), tiles)](
            out, x, weight.codes, out if weight.scales is None else weight.scales,
            out if weight.zeros is None else weight.zeros, out if weight.row_scales is None else weight.row_scales,
            bias, weights, pairs.chosen if pairs.order is None else pairs.order,
            pairs.chosen if pairs.ends is None else pairs.ends, pairs.count, experts, width, depth,
            weight.codes.shape[1], -(-depth // weight.group), TOP_K=pairs.top_k, SORTED=pairs.order is not None,
            GATHER=gated, GATED=gated, ACT=int(activation or 0), EXPERTS=triton.next_power_of_2(experts),
            KIND=KINDS[weight.kind], GROUP=weight.group, SCALES=weight.scales is not None,
            ZEROS=weight.zeros is not None, ROW_SCALES=weight.row_scales is not None,
            ON_SUMS=scales_sums(KINDS[weight.kind], weight.group, tile.block_k), PAIRS=makes_pairs(x),
            EVEN=depth % tile.block_k == 0, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            num_warps=tile.warps, num_stages=tile.stages, **launch_options(),
        )  # fmt: skip
    return out


def coded_product_reference(
    x: Tensor, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    tile: Tile, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return grouped_reference(x, weight.dense().view(experts, -1, weight.depth), bias, pairs, activation, weights)


def stages(device: Target) -> int:
    """The number of pipeline stages of a loop's loads."""
    return 3 if device.loads_past_registers else 2


def coded_tile(each: float, kind: Kind, group: int, size: int, num_stages: int) -> Tile:
    """The tile for `each` pairs per expert, of `size` bytes per value."""
    block_m = 16 if each <= 16 else 32 if each <= 32 or size > 2 else 64
    return Tile(block_m, 64, block_k_of(KINDS[kind], group, size), num_stages, 4)
