"""Experts in MXFP4 of a row's few pairs, by multiply-adds in float32: each pair goes to its own expert.

    y[pair, n] = sum_g scale[expert, n, g] sum_(k in g) code[expert, n, k] x[token, k]   (+ bias) (activation)

As gemm/one_row, for the same reason: matrix units want 16 rows, and tiles on their way to them pass shared memory and
barriers. The bits of a code of E2M1 are a float where they lie: its exponent and mantissa moved to the least bits of
float32's exponent and the first of its mantissa are the code's value times 2^-126, the sign goes to the sign. x is
multiplied by what the bits are off by, which is exact; magnitudes of x up to 2^47 have their place.
Users: moe/mxfp4.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.groups import Packed
from engine.kernels.gemm.one_row import Cut, as_float, by_groups, columns_of
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

NEAR = tl.constexpr(2.0**80)  # x times this meets codes
FAR = tl.constexpr(2.0**46)  # 2^126 / NEAR
WORDS = 8  # of 32 bits that two scales, one word of 32 bits, stand for


@triton.jit
def meet(tile, columns, FIRST: tl.constexpr):
    """Codes of each 16 bits of the words [rows, words], from code FIRST on, times their columns: float32 [rows, words],
    times NEAR * 2^-126."""
    sums = tl.zeros(tile.shape, tl.float32)
    for number in tl.static_range(len(columns)):
        sums = met(sums, tile, columns[number], 4 * (FIRST + number // 2 + 4 * (number % 2)))
    return sums


@triton.jit
def met(sums, tile, x, AT: tl.constexpr):
    """sums + the codes that begin at bit AT of the words times x [words]."""
    moved = tile << (22 - AT) if AT <= 22 else tile >> (AT - 22)
    bits = (moved & 0x01C00000) | ((tile << (28 - AT)) & -0x80000000)
    return sums + as_float(bits) * (x * NEAR)[None, :]


@triton.jit
def pairs_kernel(
    out,  # [pairs, width]
    x,  # GATHER: [tokens, runs * 32], else [pairs, runs * 32] int32: two bfloat16
    words,  # [experts * width, runs * 8] int32 of gemm/widen; when GATED [experts * 2 * width, runs * 8]
    scales,  # [.., runs] int32: two bfloat16, of 32 columns and of the next 32
    bias,  # [..] float32, or None
    weights,  # [pairs] float32, multiply the sums of gate and of up; or None
    chosen,  # [pairs] int32: the experts
    experts,
    width,
    runs,  # of 64 columns
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    BLOCK_N: tl.constexpr,
    TURN: tl.constexpr,  # words of a row that are read at a time
    OVERLAP: tl.constexpr,
):
    """BLOCK_N results of a pair per program; the words of the next turn are on their way meanwhile."""
    MATRICES: tl.constexpr = 2 if GATED else 1
    line = runs * 8  # said so, the compiler knows that words come by fours
    ROWS: tl.constexpr = BLOCK_N * MATRICES
    pair, start = tl.program_id(1), tl.program_id(0) * BLOCK_N
    row, word, group = tl.arange(0, ROWS), tl.arange(0, TURN), tl.arange(0, TURN // 8)
    piece, column = start + row % BLOCK_N, start + tl.arange(0, BLOCK_N)
    n_in = (piece < width)[:, None]
    grid_wait(OVERLAP)
    expert = tl.load(chosen + pair, cache_modifier=".cg")
    if expert < experts:
        n = (expert * MATRICES + row // BLOCK_N).to(tl.int64) * width + piece
        word_at, scale_at = (
            words + n[:, None] * line + word[None, :],
            scales + n[:, None] * runs + group[None, :],
        )
        x_row = x + (pair // TOP_K if GATHER else pair).to(tl.int64) * (runs * 32)
        tile = tl.load(word_at, mask=n_in & (word < line)[None, :], other=0)
        scale = tl.load(scale_at, mask=n_in & (group < runs)[None, :], other=0)
        total = tl.zeros([ROWS, TURN // 8], tl.float32)
        for first in range(0, line, TURN):
            behind = first + TURN
            next_tile = tl.load(word_at + behind, mask=n_in & (behind + word < line)[None, :], other=0)
            inside = n_in & (behind // 8 + group < runs)[None, :]
            next_scale = tl.load(scale_at + behind // 8, mask=inside, other=0)
            low = by_groups(meet(tile, columns_of(x_row, first, runs * 64, 0, TURN), 0), 8)
            high = by_groups(meet(tile, columns_of(x_row, first, runs * 64, 1, TURN), 2), 8)
            total += low * as_float(scale << 16) + high * as_float(scale & -65536)
            tile, scale = next_tile, next_scale
        y = tl.sum(total, 1) * FAR
        if weights is not None:
            y *= tl.load(weights + pair)
        if bias is not None:
            y += tl.load(bias + n, mask=piece < width, other=0.0)
        if GATED:
            gate, up = tl.split(y.reshape((2, BLOCK_N)).permute((1, 0)))
            y = activate(gate, up, ACT)
        at = out + pair.to(tl.int64) * width + column
        tl.store(at, y.to(out.dtype.element_ty), mask=column < width)


def takes(x: Tensor, pairs: Pairs) -> bool:
    """Whether the kernel multiplies these rows x: those of one token, on a device whose units it is written for."""
    if pairs.order is not None or len(pairs.chosen) != 1 or x.dtype is not torch.bfloat16:
        return False
    return x.is_cuda and target().runs_ptx and x.data_ptr() % 4 == 0


def cut_of(gated: bool) -> Cut:
    """How a product is cut: the fastest of those that an H100 measured in gpt-oss-20b's layers."""
    return Cut(4 if gated else 8, 128, 2)


def launch_pairs(
    x: Tensor, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    weights: Tensor | None = None, cut: Cut | None = None,
) -> Tensor:  # fmt: skip
    """The Triton kernel; arguments as moe/mxfp4's product, x bfloat16 with rows at whole words of 32 bits."""
    depth, gated, cut = weight.depth, activation is not None, cut or cut_of(activation is not None)
    width, words = len(weight.codes) // experts // (2 if gated else 1), weight.codes.view(torch.int32)
    assert weight.scales is not None and words.shape[1] * WORDS == depth and x.shape[1] == depth
    assert x.is_contiguous() and cut.words % WORDS == 0 and (bias is None or bias.dtype is torch.float32)
    out = x.new_empty(pairs.count, width)
    pairs_kernel[(triton.cdiv(width, cut.block_n), pairs.count)](
        out, x.view(torch.int32), words, weight.scales.view(torch.int32), bias, weights, pairs.chosen, experts, width,
        depth // 64, TOP_K=pairs.top_k, GATHER=gated, GATED=gated, ACT=int(activation or 0),
        BLOCK_N=cut.block_n, TURN=cut.words, num_warps=cut.warps, num_stages=1, **launch_options(),
    )  # fmt: skip
    return out
