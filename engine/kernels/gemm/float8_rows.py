"""Products of two to eight rows of FP8 codes with FP8 codes, as in steps of a few streams or drafts.

    y[m, n] = sum_b s_x[b, m] s_w[n, b] sum_(k in b) x[m, k] w[n, k]       b: 128 columns

The time is spent on reading the weight. In mma.m16n8, sixteen weight rows are the first operand and up to eight rows of
x the second. Columns may be in any order that both operands share, so a thread holds sixteen adjacent codes of a row,
as one load delivers them, and no operand passes through shared memory (gemm/float8_row does the same with one row).
The warps of a program have parts of the columns, and a warp's registers hold its columns of x. The next codes are
loaded during the products of the current ones, the first of them before the wait for x, since weights do not depend on
the previous kernel. The order of additions depends on the weight's shape alone. Users: gemm/dispatch_float8.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.descriptors import is_aligned
from engine.kernels.gemm.float8 import BLOCK, Tile, float8_product_reference
from engine.kernels.gemm.float8_row import OF_WORDS, OPERANDS, WORD
from engine.kernels.gemm.groups import Packed
from engine.kernels.gemm.widen import E4M3, widened
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

MOST_ROWS = 8  # rows of x of an instruction
HIGH = 16  # weight rows of an instruction
TURN = tl.constexpr(16)  # words of a row that a warp reads in one load
PER = tl.constexpr(BLOCK // WORD)  # words of 128 columns
TURNS = 4  # loads of a row that a warp has in flight, and as many of the next columns
LARGE = 12 << 20  # codes of the largest weight; gemm/float8_few reads larger ones faster
SHARE = 512  # columns of a warp, if eight warps are enough
MOST_COLUMNS = 8192  # of x, which the registers of eight warps hold
PROGRAMS = {2: 6, 4: 3, 8: 1}  # warps -> programs per unit that the registers allow


class Cut(NamedTuple):
    """How a product of a few rows is divided."""

    blocks: int  # blocks of sixteen weight rows per program
    warps: int  # warps that share the columns


@triton.jit
def weights_of(words, scales, first, chunk, line, groups, end, TURNS: tl.constexpr, WARPS: tl.constexpr):
    """Loads a chunk of the columns of sixteen weight rows: per turn the words [lanes, 4] of a row and of the row eight
    rows below, and per two turns their scales [lanes, 1]; zeros from row `end` on and behind the last column."""
    lane, word = tl.arange(0, 32 * WARPS)[:, None], tl.arange(0, 4)[None, :]
    row, start = first + lane // 4 % 8, (chunk * WARPS + lane // 32) * (TURNS * TURN)
    one, other, by_one, by_other = (), (), (), ()
    for turn in tl.static_range(TURNS):
        at = start + turn * TURN + lane % 4 * 4
        one_in, other_in = (row < end) & (at < line), (row + 8 < end) & (at < line)
        place = words + row.to(tl.int64) * line + at + word
        one += (tl.load(place, mask=one_in, other=0),)  # type: ignore[assignment]
        other += (tl.load(place + 8 * line, mask=other_in, other=0),)  # type: ignore[assignment]
        if turn % 2 == 0:
            inside = start + turn * TURN < line
            place = scales + row.to(tl.int64) * groups + (start + turn * TURN) // PER
            scale = tl.load(place, mask=inside & (row < end), other=0.0)
            below = tl.load(place + 8 * groups, mask=inside & (row + 8 < end), other=0.0)
            by_one += (scale.to(tl.float32),)  # type: ignore[assignment]
            by_other += (below.to(tl.float32),)  # type: ignore[assignment]
    return one, other, by_one, by_other


@triton.jit
def tokens_of(x, scales, chunk, line, rows, TURNS: tl.constexpr, WARPS: tl.constexpr):
    """Loads a chunk of the columns of eight rows of x: per turn words [lanes, 4], and per two turns the scales
    [lanes, 1] of the two rows whose sums a thread has."""
    lane, word = tl.arange(0, 32 * WARPS)[:, None], tl.arange(0, 4)[None, :]
    row, start = lane // 4 % 8, (chunk * WARPS + lane // 32) * (TURNS * TURN)
    held, even, odd = (), (), ()
    for turn in tl.static_range(TURNS):
        at = start + turn * TURN + lane % 4 * 4
        held += (tl.load(x + row * line + at + word, mask=(row < rows) & (at < line), other=0),)  # type: ignore[assignment]
        if turn % 2 == 0:
            of_sums, inside = lane % 4 * 2, start + turn * TURN < line
            place = scales + (start + turn * TURN) // PER * rows + of_sums
            even += (tl.load(place, mask=inside & (of_sums < rows), other=0.0),)  # type: ignore[assignment]
            odd += (tl.load(place + 1, mask=inside & (of_sums + 1 < rows), other=0.0),)  # type: ignore[assignment]
    return held, even, odd


@triton.jit
def met_by_units(one, other, tokens):
    """Words [lanes, 4] of sixteen weight rows times those of eight rows of x, by an instruction."""
    return tl.inline_asm_elementwise(OF_WORDS, OPERANDS, (one, other, tokens), dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def eight_met(words, tokens, KIND: tl.constexpr, WARPS: tl.constexpr):
    """Words [lanes, 4] of eight weight rows times those of eight rows of x, in float32: [WARPS, 8, 4, 2]."""
    words, tokens = tl.reshape(words, [WARPS, 8, 1, 16]), tl.reshape(tokens, [WARPS, 1, 8, 16])
    sums = tl.zeros([WARPS, 8, 8], tl.float32)
    for at in tl.static_range(4):
        column = widened(((tokens >> (8 * at)) & 255).to(tl.uint8), KIND)
        column = tl.where(((tokens >> (8 * at)) & 0x7F) == 0x7F, float("nan"), column)
        sums += tl.sum(widened(((words >> (8 * at)) & 255).to(tl.uint8), KIND) * column, 3)
    return tl.reshape(sums, [WARPS, 8, 4, 2])


@triton.jit
def met(one, other, tokens, KIND: tl.constexpr, WARPS: tl.constexpr):
    """As `met_by_units`, for devices without units for e4m3."""
    both = tl.join(eight_met(one, tokens, KIND, WARPS), eight_met(other, tokens, KIND, WARPS))
    return tl.reshape(tl.permute(both, [0, 1, 2, 4, 3]), [WARPS * 32, 4])


@triton.jit
def products(sums, weight, tokens, NATIVE: tl.constexpr, KIND: tl.constexpr, TURNS: tl.constexpr, WARPS: tl.constexpr):
    """Adds the scaled products of a chunk to a thread's sums [lanes, 4]: two of a weight row, two of the row eight rows
    below."""
    place = tl.arange(0, 4)[None, :]
    for turn in tl.static_range(0, TURNS, 2):
        one, other, token = weight[0][turn], weight[1][turn], tokens[0][turn]
        after, below, behind = weight[0][turn + 1], weight[1][turn + 1], tokens[0][turn + 1]
        if NATIVE:
            made = met_by_units(one, other, token) + met_by_units(after, below, behind)
        else:
            made = met(one, other, token, KIND, WARPS) + met(after, below, behind, KIND, WARPS)
        scale = tl.where(place < 2, weight[2][turn // 2], weight[3][turn // 2])
        sums += made * (scale * tl.where(place % 2 == 0, tokens[1][turn // 2], tokens[2][turn // 2]))
    return sums


@triton.jit(do_not_specialize=["rows"])
def float8_rows_kernel(
    out,  # [rows, width]
    x,  # [rows, runs * 4] int32 words of codes
    x_scales,  # [groups, rows] float32
    words,  # [width, runs * 4] int32
    scales,  # [width, groups]
    bias,  # [width] or None
    residual,  # [rows, width], or None; may be out
    rows,
    width,
    runs,  # runs of 16 columns in a row
    groups,  # groups of 128 columns
    blocks,  # blocks of sixteen weight rows per program
    NATIVE: tl.constexpr,  # matrix units multiply e4m3
    KIND: tl.constexpr,  # e4m3's number in gemm/widen
    CHUNKS: tl.constexpr,  # of a warp's columns
    TURNS: tl.constexpr,  # loads of a weight row in a chunk
    WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes `blocks` times sixteen weight rows; a warp holds its columns of x."""
    line = runs * 4  # written in this way, so that the compiler knows that words come in fours
    first = tl.program_id(0) * (blocks * 16)
    end = tl.minimum(first + blocks * 16, width)
    weight = weights_of(words, scales, first, 0, line, groups, end, TURNS, WARPS)
    grid_wait(OVERLAP)
    held = ()
    for chunk in tl.static_range(CHUNKS):
        held += (tokens_of(x, x_scales, chunk, line, rows, TURNS, WARPS),)  # type: ignore[assignment]
    lane, place = tl.arange(0, 32)[:, None], tl.arange(0, 4)[None, :]
    for _ in range(blocks):
        sums = tl.zeros([32 * WARPS, 4], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            if chunk + 1 < CHUNKS:
                following = weights_of(words, scales, first, chunk + 1, line, groups, end, TURNS, WARPS)
            else:
                following = weights_of(words, scales, first + 16, 0, line, groups, end, TURNS, WARPS)
            sums = products(sums, weight, held[chunk], NATIVE, KIND, TURNS, WARPS)
            weight = following
        n, m = first + lane // 4 % 8 + place // 2 * 8, lane % 4 * 2 + place % 2
        y = tl.sum(tl.reshape(sums, [WARPS, 32, 4]), 0)
        inside, at = (n < end) & (m < rows), m.to(tl.int64) * width + n
        if bias is not None:
            y += tl.load(bias + n, mask=n < end, other=0.0)
        if residual is not None:
            y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
        first += 16


def takes(x: Tensor, weight: Packed) -> bool:
    """Whether the kernel multiplies these rows of codes [M, K] on this device, and faster than others: measured on an
    H200."""
    if not 2 <= len(x) <= MOST_ROWS or weight.scales is None or weight.depth % (4 * WORD):
        return False
    small = weight.depth <= MOST_COLUMNS and len(weight.codes) * weight.depth <= LARGE
    native = x.is_cuda and target().runs_ptx and target().multiplies_float8
    return small and native and is_aligned(x) and is_aligned(weight.codes)


def cut_of(width: int, depth: int, units: int) -> Cut:
    """The division of a product: all programs run at the same time."""
    warps = max(2, min(8, triton.next_power_of_2(triton.cdiv(depth, SHARE))))
    return Cut(triton.cdiv(triton.cdiv(width, HIGH), units * PROGRAMS[warps]), warps)


def float8_rows_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    """Codes x [M, K] and x_scales [groups, M] times the weight [N, K] into out [M, N]; residual [M, N], may be out."""
    if x.is_cuda:
        launch_float8_rows_product(x, x_scales, weight, bias, residual, out, cut, target().multiplies_float8)
    else:
        float8_product_reference(x, x_scales, weight, bias, residual, out, Tile(16, 64, BLOCK, BLOCK, 1, 4))


def launch_float8_rows_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    cut: Cut | None = None, native: bool = False,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as `float8_rows_product`. `native`: matrix units multiply e4m3."""
    (rows, depth), width, scales = x.shape, len(weight.codes), weight.scales
    groups = -(-depth // BLOCK)
    assert depth == weight.depth and depth % (4 * WORD) == 0 and rows <= MOST_ROWS
    assert x.is_contiguous() and x_scales.is_contiguous() and out.is_contiguous() and out.shape == (rows, width)
    assert scales is not None and weight.row_scales is None and scales.numel() == width * groups
    assert x_scales.shape == (groups, rows)
    blocks, warps = cut or cut_of(width, depth, target().num_units)
    float8_rows_kernel[(triton.cdiv(width, HIGH * blocks),)](
        out, x.view(torch.int32), x_scales, weight.codes.view(torch.int32), scales, bias, residual, rows, width,
        depth // (4 * WORD), groups, blocks, NATIVE=native, KIND=E4M3,
        CHUNKS=triton.cdiv(depth // WORD, warps * TURNS * TURN.value), TURNS=TURNS, WARPS=warps, num_warps=warps,
        num_stages=1, **launch_options(),
    )  # fmt: skip
