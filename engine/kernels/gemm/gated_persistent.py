"""The gated product of many rows in one kernel: y = activate(x gate^T + b, x up^T + c), the first half of gated MLPs.

One matrix instruction multiplies a tile of rows by equal numbers of gate rows and up rows, so both halves of a result
end in one thread, and gate and up are never written to memory. Every unit runs one program, which goes from tile to
tile and loads the next tile's first columns while it writes the previous tile; the tiles of a group share weight rows
in the L2 cache. The disadvantage: with few tiles in the last round most units wait, so kernels/tune checks how full
the rounds are. Blocks are loaded by tensor descriptors (TMA, CUDA from sm_90 on) if rows are 16-byte aligned, else by
plain pointers.
Users: gemm/dispatch on accelerators, for the weights and numbers of rows that kernels/tune names.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate, activate_reference
from engine.kernels.gemm.descriptors import describe, has_descriptors, is_aligned
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

GROUP = 16  # tiles of rows that are processed together, for the cache


class Tile(NamedTuple):
    """The tile that a program computes at a time."""

    block_m: int  # rows
    block_n: int  # columns of the result: as many gate rows and as many up rows
    block_k: int  # columns of x read at a time
    stages: int
    warps: int


DESCRIBED = Tile(128, 128, 64, 4, 8)  # loads by descriptors
POINTED = Tile(128, 64, 32, 3, 8)  # by pointers; fits in the 64 KB of shared memory that a gfx942 has


@triton.jit
def load_blocks(
    x, weight, m, n, k, rows, width, depth, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """By pointers: x [BLOCK_M, BLOCK_K] from (m, k) on, weight [gate rows, then up rows from n on, BLOCK_K]."""
    row = m + tl.arange(0, BLOCK_M)
    column = k + tl.arange(0, BLOCK_K)
    number = tl.arange(0, 2 * BLOCK_N)
    place = n + number % BLOCK_N
    x_at = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    w_at = weight + (number // BLOCK_N * width + place).to(tl.int64)[:, None] * depth + column[None, :]
    in_depth = (column < depth)[None, :]
    tokens = tl.load(x_at, mask=(row < rows)[:, None] & in_depth, other=0.0)
    return tokens, tl.load(w_at, mask=(place < width)[:, None] & in_depth, other=0.0)


@triton.jit(do_not_specialize=["rows", "width"])
def gated_kernel(
    out,  # [rows, width]; DESCRIBED: in blocks [BLOCK_M, BLOCK_N]
    x,  # [rows, depth], rows x_stride apart; DESCRIBED: in blocks [BLOCK_M, BLOCK_K]
    weight,  # [2 * width, depth]; DESCRIBED: [2, width, depth] in blocks [2, BLOCK_N, BLOCK_K]
    bias,  # [2 * width] when BIAS
    rows,
    width,
    depth,
    x_stride,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,  # an Activation
    DESCRIBED: tl.constexpr,  # out, x and weight are descriptors; loads continue from one tile to the next
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes tiles program, program + programs, ...; the order is GROUP tiles of rows, then the next columns."""
    grid_wait(OVERLAP)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
    tl.assume(depth > 0)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=DESCRIBED):
        group = number // (GROUP * tiles_n)
        inner = number - group * GROUP * tiles_n
        here = tl.minimum(tiles_m - group * GROUP, GROUP)
        m, n = (group * GROUP + inner % here) * BLOCK_M, inner // here * BLOCK_N
        sums = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in tl.range(0, depth, BLOCK_K):
            if DESCRIBED:
                tokens, weights = x.load([m, k]), weight.load([0, n, k]).reshape((2 * BLOCK_N, BLOCK_K))
            else:
                tokens, weights = load_blocks(
                    x, weight, m, n, k, rows, width, depth, x_stride, BLOCK_M, BLOCK_N, BLOCK_K
                )
            sums = tl.dot(tokens, weights.T, sums, input_precision="ieee")
        gate, up = sums.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
        column = n + tl.arange(0, BLOCK_N)
        if BIAS:
            gate += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + width + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        y = activate(gate, up, ACT)
        if DESCRIBED:
            out.store([m, n], y.to(out.dtype))
        else:
            row = m + tl.arange(0, BLOCK_M)
            at = out + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(at, y.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < width)[None, :])


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: Activation) -> None:
    """x [M, K] with contiguous rows times weight [2N, K], gate first, into out [M, N]; bias [2N].

    All tensors have the same dtype; all but x are contiguous. Can be captured.
    """
    if x.is_cuda:
        launch_gated(x, weight, bias, out, activation)
    else:
        gated_reference(x, weight, bias, out, activation)


def launch_gated(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: Activation) -> None:
    """The Triton kernel; arguments as `gated_product`."""
    rows, depth = x.shape
    width = out.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous() and out.shape == (rows, width)
    assert weight.shape == (2 * width, depth), f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}, width {width}"
    if rows == 0:
        return
    described = has_descriptors() and all(is_aligned(tensor) for tensor in (out, x, weight))
    tile = DESCRIBED if described else POINTED
    y, tokens, weights = out, x, weight
    if described:  # passed by value, so a graph holds them
        y = describe(out, tile.block_m, tile.block_n)
        tokens = describe(x, tile.block_m, tile.block_k)
        weights = describe(weight.view(2, width, depth), 2, tile.block_n, tile.block_k)
    programs = min(target().num_units, triton.cdiv(rows, tile.block_m) * triton.cdiv(width, tile.block_n))
    gated_kernel[(programs,)](
        y, tokens, weights, out if bias is None else bias, rows, width, depth, x.stride(0),
        BIAS=bias is not None, ACT=int(activation), DESCRIBED=described, GROUP=GROUP, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps, num_stages=tile.stages, **launch_options(),
    )  # fmt: skip


def gated_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, activation: Activation
) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    both = torch.nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    y = activate_reference(both, activation)
    return y.to(x.dtype) if out is None else out.copy_(y)
