"""Experts in MXFP4 for the few pairs of a row: each pair goes to its own expert, and no tile is shared.

    y[pair, n] = sum_g scale[expert, n, g] sum_(k in g) code[expert, n, k] x[token, k]   (+ bias) (activation)

With one row nearly all time goes to reading weights, and tiles for matrix units would have to pass through shared
memory and barriers. Here a warp has two weight rows and the row of x, and the matrix unit multiplies the values that
each thread holds (gemm/diagonals). Two codes become two bfloat16 in four operations (gemm/widen) and are too small by
2^126: a factor 2^96 goes to the scales, which are powers of two up to 2^31, and the rest to the result.
A program computes several pairs of weight rows in sequence and loads the next rows' codes meanwhile. The experts of the
second product are known before the first product ends, so its first codes can be loaded before, too.
Users: moe/dispatch_codes.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.diagonals import on_diagonals
from engine.kernels.gemm.groups import Packed, makes_pairs
from engine.kernels.gemm.one_row import as_float
from engine.kernels.gemm.widen import widened
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import grid_wait, launch_options, wait_then_allow
from engine.kernels.target import target, tl, triton

WORDS = 8  # 32-bit words of codes per word of two scales
TURN = 128  # words of a row that a warp reads in one iteration, four per thread
PROGRAMS = 16  # per unit: as many as its registers allow
FAR = tl.constexpr(2.0**30)  # 2^126 / 2^96
# A scale times 2^96, in both halves of a word; $2 selects the lower or the upper scale of a word.
FACTOR = tl.constexpr(
    "{ .reg .b32 s, far, zero; mov.b32 far, 0x6f806f80; mov.b32 zero, 0x80008000;"
    " prmt.b32 s, $1, 0, $2; fma.rn.bf16x2 $0, s, far, zero; }"
)
PLACES = ("shl.b32 w, {0}, 12; shl.b32 s, {0}, 6;", "shl.b32 w, {0}, 8; shl.b32 s, {0}, 2;",
          "shl.b32 w, {0}, 4; shr.u32 s, {0}, 2;", "mov.b32 w, {0}; shr.u32 s, {0}, 6;")  # fmt: skip


def of_words() -> str:
    """Return PTX that adds products of four words. Operands: sums ($0 to $3; before: $4 to $7), words of a row ($8) and
    of another ($12), columns of x ($16, $20, $24, $28), lower and upper factors of the first row ($32, $36) and of the
    other row ($40, $44)."""
    text = "{ .reg .b32 w, s, zero, a0, a1, b0, b1; .reg .f32 c0, c1, c2, c3; mov.b32 zero, 0x80008000;"
    text += "".join(f" mov.f32 c{at}, ${4 + at};" for at in range(4))
    for word in range(4):
        for half in range(2):
            for row, codes, factor in (("a", 8, 32), ("b", 12, 40)):
                for place in range(2):
                    text += " " + PLACES[2 * half + place].format(f"${codes + word}")
                    text += " and.b32 s, s, 0x01c001c0; lop3.b32 w, w, 0x80008000, s, 0xea;"
                    text += f" fma.rn.bf16x2 {row}{place}, w, ${factor + 4 * half + word}, zero;"
            text += " mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3}, {a0, b0, a1, b1},"
            text += f" {{${16 + 8 * half + word}, ${20 + 8 * half + word}}}, {{c0, c1, c2, c3}};"
    return text + "".join(f" mov.f32 ${at}, c{at};" for at in range(4)) + " }"


OF_WORDS, OPERANDS = tl.constexpr(of_words()), tl.constexpr(",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 40))


@triton.jit
def factor(scale, UPPER: tl.constexpr):
    return tl.inline_asm_elementwise(
        FACTOR, "=r,r,r", [scale, 0x3232 if UPPER else 0x1010], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def met_by_units(sums, one, other, x0, x1, x2, x3, of_one, of_other):
    """Return sums + words [lanes, 4] of two weight rows times their columns, in registers as `mma` leaves them.

    A thread may hold any four words of the two rows, because codes, columns and scales have the same layout.
    """
    low, high = factor(of_one, False), factor(of_one, True)
    other_low, other_high = factor(of_other, False), factor(of_other, True)
    operands = (sums, one, other, x0, x1, x2, x3, low, high, other_low, other_high)
    return tl.inline_asm_elementwise(OF_WORDS, OPERANDS, operands, dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def met(words, x0, x1, x2, x3, scale):
    """Multiply the words [lanes, 4] of a weight row by their columns in float32, without matrix units."""
    columns, sums = (x0, x1, x2, x3), tl.zeros(words.shape, tl.float32)
    for place in tl.static_range(4):
        of_scale = as_float(scale << 16 if place < 2 else scale & -65536)
        for half in tl.static_range(2):
            x = as_float(columns[place] << 16 if half == 0 else columns[place] & -65536)
            sums += widened((words >> (16 * half + 4 * place)) & 15, 1) * of_scale * x
    return sums


@triton.jit
def line_of(words, scales, n, line, end, TURN: tl.constexpr, TURNS: tl.constexpr):
    """Load weight row n: per iteration codes [lanes, 4] and scales [lanes, 1]; 0 from word `end` on."""
    lane, word = tl.arange(0, TURN // 4)[:, None], tl.arange(0, 4)[None, :]
    code_at, scale_at = words + n * line + lane * 4 + word, scales + n * (line // 8) + lane // 2
    codes, factors = (), ()
    for turn in tl.static_range(TURNS):
        there = turn * TURN + lane * 4 < end
        codes += (tl.load(code_at + turn * TURN, mask=there, other=0),)  # type: ignore[assignment]
        factors += (tl.load(scale_at + turn * (TURN // 8), mask=there, other=0),)  # type: ignore[assignment]
    return codes, factors


@triton.jit
def columns_of(x, line, TURN: tl.constexpr, TURNS: tl.constexpr):
    """Load the columns of x that match a weight row's words: per iteration and place in 16 bits, two bfloat16 [lanes,
    4]."""
    lane, word = tl.arange(0, TURN // 4)[:, None], tl.arange(0, 4)[None, :]
    x_at, columns = x + lane // 2 * 32 + lane % 2 * 4 + word, ()
    for turn in tl.static_range(TURNS):
        there = turn * TURN + lane * 4 < line
        for place in tl.static_range(4):
            both = tl.load(x_at + turn * TURN * 4 + 8 * place, mask=there, other=0)
            columns += (both,)  # type: ignore[assignment]
    return columns


@triton.jit
def two_lines(words, scales, bias, n, m, line, n_in, m_in, TURN: tl.constexpr, TURNS: tl.constexpr):
    """Load codes, scales and biases of the weight rows n and m; a row whose mask is off gets zeros."""
    of_one, of_other = 0.0, 0.0
    if bias is not None:
        of_one = tl.load(bias + n, mask=n_in, other=0.0)
        of_other = tl.load(bias + m, mask=m_in, other=0.0)
    one = line_of(words, scales, n, line, tl.where(n_in, line, 0), TURN, TURNS)
    other = line_of(words, scales, m, line, tl.where(m_in, line, 0), TURN, TURNS)
    return one, other, of_one, of_other


@triton.jit
def pairs_kernel(
    out,  # [pairs, width]
    x,  # GATHER: [tokens, runs * 32]: a token's pairs share its row; else [pairs, runs * 32] int32: two bfloat16
    words,  # [experts * width, runs * 8] int32 of gemm/widen; when GATED [experts * 2 * width, runs * 8]
    scales,  # [.., runs] int32: two bfloat16, of 32 columns and of the next 32
    bias,  # [..] float32, or None
    weights,  # [pairs] float32, factors for the sums of gate and of up; or None
    chosen,  # [pairs] int32: the experts
    experts,
    width,
    runs,  # runs of 64 columns in a row
    blocks,  # blocks of two weight rows per program
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    FIRST: tl.constexpr,  # the previous kernel chose the experts
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    TURN: tl.constexpr,  # words of a row that are read in one iteration
    TURNS: tl.constexpr,
    PAIRS: tl.constexpr,  # as in gemm/code_sums: whether matrix units multiply
    OVERLAP: tl.constexpr,
):
    """A program computes `blocks` times two weight rows for a pair: a gate and an up row when GATED, else adjacent
    rows."""
    MATRICES: tl.constexpr = 2 if GATED else 1
    STEP: tl.constexpr = 1 if GATED else 2
    line = runs * 8  # this form shows the compiler that it is a multiple of 4
    pair, piece = tl.program_id(1), tl.program_id(0) * (blocks * STEP)
    end = tl.minimum(piece + blocks * STEP, width)
    if FIRST:
        wait_then_allow(OVERLAP)
    expert = tl.load(chosen + pair, cache_modifier=".cg").to(tl.int64)
    first, second = expert * MATRICES * width, (expert * MATRICES + MATRICES - 1) * width + (STEP - 1)
    end = tl.where(expert < experts, end, 0)
    one, other, of_one, of_other = two_lines(words, scales, bias, first + piece, second + piece, line, piece < end,
                                             piece + STEP - 1 < end, TURN, TURNS)  # fmt: skip
    if not FIRST:
        grid_wait(OVERLAP)
    if piece < end:
        columns = columns_of(x + (pair // TOP_K if GATHER else pair).to(tl.int64) * (runs * 32), line, TURN, TURNS)
        weight = 1.0
        if weights is not None:
            weight = tl.load(weights + pair)
        at = out + pair.to(tl.int64) * width
        for _ in range(blocks):
            ahead = piece + STEP
            following = two_lines(words, scales, bias, first + ahead, second + ahead, line, ahead < end,
                                  ahead + STEP - 1 < end, TURN, TURNS)  # fmt: skip
            sums, others = tl.zeros([TURN // 4, 4], tl.float32), tl.zeros([TURN // 4, 4], tl.float32)
            for turn in tl.static_range(TURNS):
                x0, x1, x2, x3 = columns[4 * turn], columns[4 * turn + 1], columns[4 * turn + 2], columns[4 * turn + 3]
                if PAIRS:
                    sums = met_by_units(
                        sums, one[0][turn], other[0][turn], x0, x1, x2, x3, one[1][turn], other[1][turn]
                    )
                else:
                    sums += met(one[0][turn], x0, x1, x2, x3, one[1][turn])
                    others += met(other[0][turn], x0, x1, x2, x3, other[1][turn])
            if PAIRS:
                sums, others = on_diagonals(sums)
                sums, others = sums * FAR, others * FAR
            y = tl.sum(tl.sum(sums, 1), 0) * weight + of_one
            z = tl.sum(tl.sum(others, 1), 0) * weight + of_other
            if GATED:
                y = activate(y, z, ACT)
            else:
                tl.store(at + piece + 1, z.to(out.dtype.element_ty), mask=piece + 1 < end)
            tl.store(at + piece, y.to(out.dtype.element_ty), mask=piece < end)
            one, other, of_one, of_other = following
            piece = ahead


def takes(x: Tensor, pairs: Pairs) -> bool:
    """Whether the kernel can multiply the rows x: they belong to one token, and the device runs the kernel's PTX.

    The kernel runs both products of a layer or neither, because the second relies on when the first lets it start.
    """
    if pairs.order is not None or len(pairs.chosen) != 1 or x.dtype is not torch.bfloat16:
        return False
    return x.is_cuda and target().runs_ptx


def blocks_of(width: int, pairs: int, gated: bool) -> int:
    """Blocks per program, chosen so that all programs run at the same time."""
    return triton.cdiv(width * pairs, (1 if gated else 2) * PROGRAMS * target().num_units)


def launch_pairs(
    x: Tensor, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    weights: Tensor | None = None, first: bool = True, blocks: int | None = None,
) -> Tensor:  # fmt: skip
    """Launch the Triton kernel; arguments as moe/mxfp4's product; x is bfloat16, its rows are aligned to 16 bytes.

    first: of both products of a layer. Then it reads the experts, and lets the next kernel start, when the previous
    kernels have ended. The second product reads the experts before."""
    depth, gated = weight.depth, activation is not None
    width, words = len(weight.codes) // experts // (2 if gated else 1), weight.codes.view(torch.int32)
    assert weight.scales is not None and words.shape[1] * WORDS == depth and x.shape[1] == depth
    assert x.is_contiguous() and x.data_ptr() % 16 == 0 and (bias is None or bias.dtype is torch.float32)
    assert len(x) in (len(pairs.chosen), pairs.count)
    blocks = blocks or blocks_of(width, pairs.count, gated)
    out = x.new_empty(pairs.count, width)
    pairs_kernel[(triton.cdiv(width, blocks * (1 if gated else 2)), pairs.count)](
        out, x.view(torch.int32), words, weight.scales.view(torch.int32), bias, weights, pairs.chosen, experts, width,
        depth // 64, blocks, TOP_K=pairs.top_k, GATHER=len(x) < pairs.count, FIRST=first, GATED=gated,
        ACT=int(activation or 0), TURN=TURN, TURNS=triton.cdiv(depth // WORDS, TURN), PAIRS=makes_pairs(x), num_warps=1,
        num_stages=1, **launch_options(),
    )  # fmt: skip
    return out
