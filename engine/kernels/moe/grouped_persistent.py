"""Products of many pairs with their experts' matrices: the results of moe/grouped, by persistent programs.

One matrix instruction multiplies a tile of an expert's pairs by BLOCK_N gate rows and BLOCK_N up rows, or by
2 * BLOCK_N rows if there is no activation. Every unit runs one program, which goes from tile to tile and loads the next
tile's first columns while it writes the previous result. Only the device knows how many tiles there are, so the
programs count them. The expert's matrix, and rows in sorted order, are read through tensor descriptors (TMA, CUDA from
sm_90 on); tokens' rows are gathered through pointers. Rows after an expert's last pair are computed with its tile but
not written. Users: moe/dispatch on accelerators, for the weights and numbers of pairs that moe/tiles names.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.descriptors import describe, has_descriptors, is_aligned
from engine.kernels.moe.grouped import Tile, grouped_reference
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import Target, target, tl, triton


@triton.jit
def store_part(out, bias, sums, target, m_in, n, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write sums [BLOCK_M, BLOCK_N], plus the bias of these columns, to the rows `target` of the result."""
    column = n + tl.arange(0, BLOCK_N)
    n_in = column < width
    if bias is not None:
        sums += tl.load(bias + column, mask=n_in, other=0.0).to(tl.float32)[None, :]
    at = out + target.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=m_in[:, None] & n_in[None, :])


@triton.jit
def persistent_kernel(
    out,  # [pairs, width]: in sorted order with GATHER, else by pair
    x,  # GATHER: [tokens, depth]; else [pairs, depth] in sorted order, in blocks [BLOCK_M, BLOCK_K]
    weight,  # [experts, width, depth] in blocks [1, 2 * BLOCK_N, BLOCK_K]; GATED [experts * 2, ..] in [2, BLOCK_N, ..]
    bias,  # [experts, width] or [experts, 2 * width], or None
    weights,  # [pairs] float32 by pair, factors for the sums of gate and of up; or None
    order,  # [pairs] int32
    ends,  # [experts] int32
    experts,
    width,
    depth,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    EXPERTS: tl.constexpr,  # power of two >= experts
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    OVERLAP: tl.constexpr,
):
    """Compute tiles program, program + programs, ...: all columns of a tile of pairs, then the next pairs."""
    grid_wait(OVERLAP)
    tl.assume(depth > 0)
    lane = tl.arange(0, EXPERTS)
    end_of = tl.load(ends + lane, mask=lane < experts, other=0, cache_modifier=".cg")
    start_of = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < experts), other=0, cache_modifier=".cg")
    tiles_of = tl.where(lane < experts, (end_of - start_of + BLOCK_M - 1) // BLOCK_M, 0)
    behind = tl.cumsum(tiles_of, 0)  # tiles up to and including each expert
    columns: tl.constexpr = BLOCK_N if GATED else 2 * BLOCK_N
    tiles_n = tl.cdiv(width, columns)
    k = tl.arange(0, BLOCK_K)
    for number in tl.range(tl.program_id(0), tl.sum(tiles_of, 0) * tiles_n, tl.num_programs(0), flatten=True):
        tile = number // tiles_n
        n = (number - tile * tiles_n) * columns
        expert = tl.sum((behind <= tile).to(tl.int32), 0)
        mine = lane == expert
        first = tl.sum(tl.where(mine, start_of + (tile - behind + tiles_of) * BLOCK_M, 0), 0)
        end = tl.sum(tl.where(mine, end_of, 0), 0)
        if GATHER:
            place = first + tl.arange(0, BLOCK_M)
            pair = tl.load(order + place, mask=place < end, other=0, cache_modifier=".cg")
            source = (pair // TOP_K).to(tl.int64) * depth
        sums = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in tl.range(0, depth, BLOCK_K):
            if GATHER:  # rows are aligned to 16 bytes; Triton 3.6 loses this fact and would not pipeline loads
                x_at = tl.multiple_of(x + (source[:, None] + (start + k)[None, :]), (1, 16))
                x_at = tl.max_contiguous(x_at, (1, BLOCK_K))
                rows = tl.load(x_at) if EVEN else tl.load(x_at, mask=(start + k < depth)[None, :], other=0.0)
            else:
                rows = x.load([first, start])
            matrix = weight.load([expert * 2 if GATED else expert, n, start]).reshape((2 * BLOCK_N, BLOCK_K))
            sums = tl.dot(rows, matrix.T, sums, input_precision="ieee")
        target = first + tl.arange(0, BLOCK_M)
        m_in = target < end
        if not GATHER:
            target = tl.load(order + target, mask=m_in, other=0, cache_modifier=".cg")
        left, right = sums.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
        if GATED:
            if weights is not None:
                pair = tl.load(order + target, mask=m_in, other=0, cache_modifier=".cg")
                weight_of = tl.load(weights + pair, mask=m_in, other=0.0)[:, None]
                left *= weight_of
                right *= weight_of
            if bias is not None:
                b_at = bias + expert * 2 * width + n + tl.arange(0, BLOCK_N)
                n_in = n + tl.arange(0, BLOCK_N) < width
                left += tl.load(b_at, mask=n_in, other=0.0).to(tl.float32)[None, :]
                right += tl.load(b_at + width, mask=n_in, other=0.0).to(tl.float32)[None, :]
            store_part(out, None, activate(left, right, ACT), target, m_in, n, width, BLOCK_M, BLOCK_N)
        else:
            b_at = None if bias is None else bias + expert * width
            store_part(out, b_at, left, target, m_in, n, width, BLOCK_M, BLOCK_N)
            store_part(out, b_at, right, target, m_in, n + BLOCK_N, width, BLOCK_M, BLOCK_N)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the device and the tensors x [rows, depth] and weight [E, N, depth] meet the kernel's requirements."""
    return has_descriptors() and x.element_size() == 2 and is_aligned(x) and is_aligned(weight[0])


def persistent_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, activation: Activation | None, tile: Tile,
    weights: Tensor | None = None, of_tokens: bool = False,
) -> Tensor:  # fmt: skip
    """Like `launch_grouped`, for sorted pairs and only if `takes` is true. Capturable."""
    if not x.is_cuda:
        return grouped_reference(x, weight, bias, pairs, activation, weights, of_tokens)
    return launch_persistent(x, weight, bias, pairs, activation, tile, weights, of_tokens)


def launch_persistent(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, activation: Activation | None, tile: Tile,
    weights: Tensor | None = None, of_tokens: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the Triton kernel; arguments as `persistent_product`."""
    assert pairs.order is not None and pairs.ends is not None
    assert weights is None or (activation is not None and weights.is_contiguous())
    (experts, rows, depth), gated = weight.shape, activation is not None
    gather, halves = gated or of_tokens, 2 if gated else 1
    width = rows // halves
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[1] == depth and x.dtype is weight.dtype
    out = x.new_empty(pairs.count, width)
    if pairs.count == 0:
        return out
    tiles = (triton.cdiv(pairs.count, tile.block_m) + min(experts, pairs.count)) * triton.cdiv(width, tile.block_n)
    # Descriptors are passed by value, so a graph holds them.
    matrices = describe(weight.view(experts * halves, width, depth), halves, tile.block_n, tile.block_k)
    persistent_kernel[(min(tiles, programs_of(target(), tile, halves)),)](
        out, x if gather else describe(x, tile.block_m, tile.block_k), matrices, bias, weights, pairs.order,
        pairs.ends, experts, width, depth, TOP_K=pairs.top_k, GATHER=gather, GATED=gated, ACT=int(activation or 0),
        EXPERTS=triton.next_power_of_2(experts), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n * halves // 2,
        BLOCK_K=tile.block_k, EVEN=depth % tile.block_k == 0, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(),
    )  # fmt: skip
    return out


def programs_of(device: Target, tile: Tile, halves: int) -> int:
    """Number of concurrent programs: two per unit if shared memory holds two programs' 16-bit tiles and results."""
    columns = tile.block_n * halves
    taken = 2 * (tile.stages * (tile.block_m + columns) * tile.block_k + tile.block_m * columns // 2)
    return device.num_units * (2 if 2 * taken <= device.shared_memory and tile.warps <= 4 else 1)
