"""Products of pairs with their experts' matrices: y[pair] = x[token] W[expert]^T, or an activation of gate and up.

A program multiplies a tile of one expert's pairs by a tile of the expert's rows. Only the device knows the expert of a
tile, so the grid is an upper bound: every expert's last tile may be partly empty, and programs beyond the last tile end
early. Experts that no token chose are not read. Padding pairs have no expert, and their rows are undefined. Few pairs
are not sorted: then each pair is a tile of its own.
The first product gathers the tokens' rows, the second writes each pair's row to the pair's place.
Users: moe/dispatch on accelerators.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate, activate_reference
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import grid_wait, launch_options, wait_then_allow
from engine.kernels.target import Target, tl, triton


class Tile(NamedTuple):
    """The tile that a program computes."""

    block_m: int  # pairs
    block_n: int  # rows of the expert's matrix; for a gated product, rows of gate and as many of up
    block_k: int  # columns read at a time
    stages: int
    warps: int
    splits: int = 1  # programs that share a tile's sums; only for unsorted pairs with MXFP4
    persistent: bool = False  # a program goes from tile to tile: moe/grouped_persistent, for sorted pairs
    values: bool = False  # scales multiply values: moe/values, for sorted pairs
    least: int = 0  # moe/float8, gated: pairs of an expert's smaller last tile; 0: as all tiles


@triton.jit
def wait_for_experts(SORTED: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr):
    """Waits for the previous kernel. A gated kernel of unsorted pairs starts when the experts are known, so it may read
    the experts' numbers and weights before it waits."""
    if GATED and not SORTED:
        wait_then_allow(OVERLAP)
    else:
        grid_wait(OVERLAP)


@triton.jit
def tile_of_experts(ends, number, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of tile `number` (`experts` after the last tile), the tile's first pair, and the end of the
    expert's pairs."""
    lane = tl.arange(0, EXPERTS)
    end = tl.load(ends + lane, mask=lane < experts, other=0, cache_modifier=".cg")
    start = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < experts), other=0, cache_modifier=".cg")
    tiles = tl.where(lane < experts, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    behind = tl.cumsum(tiles, 0)  # tiles up to and including this expert
    expert = tl.sum((behind <= number).to(tl.int32), 0)
    mine = lane == expert
    first = tl.sum(tl.where(mine, start + (number - behind + tiles) * BLOCK_M, 0), 0)
    return tl.minimum(expert, experts), first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def expert_of_tile(ends, number, experts, SORTED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of tile `number` (`experts` if there is none), and its first and end place in sorted order."""
    if SORTED:
        expert, first, end = tile_of_experts(ends, number, experts, EXPERTS, BLOCK_M)
    else:
        expert, first, end = tl.load(ends + number, cache_modifier=".cg"), number, number + 1
    return expert, first, end


@triton.jit
def pairs_of_tile(order, first, end, TOP_K: tl.constexpr, SORTED: tl.constexpr, GATHER: tl.constexpr,
                  BLOCK_M: tl.constexpr):  # fmt: skip
    """For a tile's BLOCK_M places return: the mask of places with a pair, the pairs, their rows of x, their result
    rows."""
    place = first + tl.arange(0, BLOCK_M)  # in sorted order
    m_in = place < end
    pair = place
    if SORTED:
        pair = tl.load(order + place, mask=m_in, other=0, cache_modifier=".cg")
    source, target = place, pair
    if GATHER:
        source, target = pair // TOP_K, place
    return m_in, pair, source, target


@triton.jit(do_not_specialize=["pairs"])
def grouped_kernel(
    out,  # [pairs, width]: in sorted order with GATHER, else by pair
    x,  # GATHER: [tokens, depth]; else [pairs, depth] in sorted order
    weight,  # [experts, width, depth]; when GATED [experts, 2 * width, depth]
    bias,  # [experts, width] or [experts, 2 * width], or None
    weights,  # [pairs] float32 by pair, factors for the sums of gate and of up; or None
    order,  # [pairs] int32 when SORTED
    ends,  # SORTED: [experts] int32; else [pairs] the experts
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    OVERLAP: tl.constexpr,
):
    """One tile of an expert's pairs and rows per program."""
    wait_for_experts(SORTED, GATED, OVERLAP)
    expert, first, end = expert_of_tile(ends, tl.program_id(1), experts, SORTED, EXPERTS, BLOCK_M)
    if expert < experts:
        m_in, pair, source, target = pairs_of_tile(order, first, end, TOP_K, SORTED, GATHER, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in = n < width
        k = tl.arange(0, BLOCK_K)
        base = weight + expert.to(tl.int64) * width * depth * (2 if GATED else 1)
        w_at = base + n.to(tl.int64)[:, None] * depth + k[None, :]
        u_at = base + (n.to(tl.int64) + width)[:, None] * depth + k[None, :]  # used only when GATED
        x_at = x + source.to(tl.int64)[None, :] * depth + k[:, None]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, depth, BLOCK_K):
            w_mask, x_mask = n_in[:, None], m_in[None, :]
            if not EVEN:
                k_in = start + k < depth
                w_mask, x_mask = w_mask & k_in[None, :], x_mask & k_in[:, None]
            rows = tl.load(x_at, mask=x_mask, other=0.0)
            sums = tl.dot(tl.load(w_at, mask=w_mask, other=0.0), rows, sums, input_precision="ieee")
            if GATED:
                ups = tl.dot(tl.load(u_at, mask=w_mask, other=0.0), rows, ups, input_precision="ieee")
                u_at += BLOCK_K
            w_at += BLOCK_K
            x_at += BLOCK_K
        if weights is not None:
            weight_of = tl.load(weights + pair, mask=m_in, other=0.0)[None, :]
            sums *= weight_of
            ups *= weight_of
        if bias is not None:
            b_at = bias + expert.to(tl.int64) * width * (2 if GATED else 1) + n
            sums += tl.load(b_at, mask=n_in, other=0.0).to(tl.float32)[:, None]
            if GATED:
                ups += tl.load(b_at + width, mask=n_in, other=0.0).to(tl.float32)[:, None]
        if GATED:
            sums = activate(sums, ups, ACT)
        at = out + target.to(tl.int64)[None, :] * width + n[:, None]
        tl.store(at, sums.to(out.dtype.element_ty), mask=n_in[:, None] & m_in[None, :])


def launch_grouped(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, activation: Activation | None, tile: Tile,
    weights: Tensor | None = None, of_tokens: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the Triton kernel: with an activation x [T, K] -> [pairs, N] in sorted order, else from that to by pair.

    weight [E, N, K], with an activation [E, 2N, K], gate first; bias [E, N] or [E, 2N]. Contiguous; one dtype.
    weights, only with an activation: float32 [T, top_k]; each pair's input is multiplied by its weight.
    of_tokens: x [T, K] is by token and the result is in sorted order, even without an activation.
    """
    assert weights is None or (activation is not None and weights.is_contiguous())
    (experts, rows, depth), gated = weight.shape, activation is not None
    gather = gated or of_tokens
    width = rows // 2 if gated else rows
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[1] == depth and x.dtype is weight.dtype
    out = x.new_empty(pairs.count, width)
    tiles = pairs.count
    if pairs.order is not None:  # every expert's last tile may be partly empty
        tiles = triton.cdiv(pairs.count, tile.block_m) + min(experts, pairs.count)
    if pairs.count:
        grouped_kernel[(triton.cdiv(width, tile.block_n), tiles)](
            out, x, weight, bias, weights, pairs.chosen if pairs.order is None else pairs.order,
            pairs.chosen if pairs.ends is None else pairs.ends, pairs.count, experts, width, depth, TOP_K=pairs.top_k,
            SORTED=pairs.order is not None, GATHER=gather, GATED=gated, ACT=int(activation or 0),
            EXPERTS=triton.next_power_of_2(experts), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, EVEN=depth % tile.block_k == 0, num_warps=tile.warps, num_stages=tile.stages,
            **launch_options(),
        )  # fmt: skip
    return out


def grouped_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    weights: Tensor | None = None, of_tokens: bool = False,
) -> Tensor:  # fmt: skip
    gather = activation is not None or of_tokens
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    places = torch.arange(pairs.count, device=x.device)
    order = places if pairs.order is None else pairs.order.long()  # pairs by place
    experts = pairs.chosen.flatten()[order]
    sources = order // pairs.top_k if gather else places
    each = torch.ones(len(order)) if weights is None else weights.flatten()[order]
    made = []
    for source, expert, factor in zip(sources.tolist(), experts.tolist(), each.tolist()):
        if expert == len(weight):  # padding
            made.append(torch.zeros(weight.shape[1] // (1 if activation is None else 2), dtype=wide, device=x.device))
            continue
        y = weight[expert].to(wide) @ x[source].to(wide) * factor
        y = y if bias is None else y + bias[expert].to(wide)
        made.append(y if activation is None else activate_reference(y, activation))
    out = torch.stack(made).to(x.dtype)
    return out if gather else torch.empty_like(out).index_copy_(0, order, out)


def tile_of(device: Target, pairs: int, experts: int, gated: bool, size: int) -> Tile:
    """Choose the tile: it holds all pairs of an expert, as far as this wastes no products. `size` is bytes per value.

    A tile of few pairs reads its matrix once and computes almost nothing, so it keeps loads of many columns in flight.
    """
    each = pairs / experts
    block_m = 16 if each <= 16 else 32 if each <= 32 else 64 if each <= 64 else 128
    block_n, block_k, stages, warps = (64, 128, 4, 4) if block_m <= 32 else (128, 64, 4, 4 if block_m == 64 else 8)
    if size > 2:
        block_k //= 2
    if gated:
        block_n //= 2
    while stages * (block_m + block_n * (2 if gated else 1)) * block_k * size > device.shared_memory:
        stages, block_k = (stages - 1, block_k) if stages > 2 else (stages, block_k // 2)
    return Tile(block_m, block_n, block_k, stages, warps)
