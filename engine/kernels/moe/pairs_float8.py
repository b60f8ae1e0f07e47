"""Experts in FP8 for the pairs of a few rows: moe/pairs with 8-bit codes.

    y[pair, n] = row_scale[expert, n] sum_b scale[expert, n, b] sum_(k in b) code[expert, n, k] x[token, k]

with 128 columns b (+ bias) (activation).

A warp has two weight rows and the row of x, and the matrix unit multiplies the values that each thread holds
(gemm/diagonals). Two codes become two bfloat16 in three or four operations: a code's bits, moved to the matching places
of a bfloat16, give a value that is too small by 2^120. So x, whose magnitudes are below 2^67, is multiplied once by
2^60, and the result again; codes need no multiplication. In one iteration a thread holds values within 128 columns, so
scales multiply sums, one per thread and weight row. As in moe/pairs, codes of the next weight rows are loaded
meanwhile, and the second product's first codes are requested before it waits.
If inputs are FP8 too, their codes are multiplied directly (moe/pairs_codes), and the scales of x are factors as well.
A shared expert, which every token has, can be multiplied in the same launch: its pairs, one per token, come last.
Users: moe/dispatch_codes, moe/dispatch_float8, moe/float8_weight.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.codes import Inputs, Kind
from engine.kernels.gemm.descriptors import is_aligned
from engine.kernels.gemm.diagonals import on_diagonals
from engine.kernels.gemm.float8_row import met
from engine.kernels.gemm.groups import Packed, makes_pairs
from engine.kernels.gemm.made_codes import made_of
from engine.kernels.gemm.one_row import as_float
from engine.kernels.gemm.quantise_floats import CodedRows
from engine.kernels.gemm.widen import BLOCK, widened
from engine.kernels.moe.pairs_codes import CODE_OPERANDS, CODES, FLOATS, MADE, OF_CODES, tokens_of
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import grid_wait, launch_options, wait_then_allow
from engine.kernels.target import target, tl, triton

WORD = 4  # codes per 32-bit word
GROUP = 128  # columns that share a scale
TURN = 128  # words of a row that a warp reads in one iteration, four per thread: four groups
# Programs per unit that its registers allow: for rows of more than two iterations, and for shorter rows.
PROGRAMS = {FLOATS: (16, 24), CODES: (24, 32), MADE: (16, 32)}
FAR = tl.constexpr(2.0**60)
FURTHER = tl.constexpr("{ .reg .b32 far, zero; mov.b32 far, 0x5d805d80; mov.b32 zero, 0x80008000;"
                       " fma.rn.bf16x2 $0, $1, far, zero; }")  # fmt: skip
PLACES = "shl.b32 w, {0}, 8; shl.b32 s, {0}, 4;", "mov.b32 w, {0}; shr.u32 s, {0}, 4;"


def of_words() -> str:
    """Return PTX: sums ($0 to $3) of four words of a weight row ($4) and of another ($8) times columns of x ($12,
    $16)."""
    text = "{ .reg .b32 w, s, a0, a1, b0, b1; .reg .f32 c0, c1, c2, c3;"
    text += "".join(f" mov.f32 c{at}, 0f00000000;" for at in range(4))
    for word in range(4):
        for row, codes in (("a", 4), ("b", 8)):
            for place in range(2):
                text += " " + PLACES[place].format(f"${codes + word}")
                text += f" and.b32 s, s, 0x07f007f0; lop3.b32 {row}{place}, w, 0x80008000, s, 0xea;"
        text += " mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3}, {a0, b0, a1, b1},"
        text += f" {{${12 + word}, ${16 + word}}}, {{c0, c1, c2, c3}};"
    return text + "".join(f" mov.f32 ${at}, c{at};" for at in range(4)) + " }"


OF_WORDS, OPERANDS = tl.constexpr(of_words()), tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 16))


@triton.jit
def floats_met(words, x0, x1):
    """Multiply the words [lanes, 4] of a weight row by their columns in float32, without matrix units."""
    sums = tl.zeros(words.shape, tl.float32)
    for half in tl.static_range(2):
        low = as_float(x0 << 16 if half == 0 else x0 & -65536)
        high = as_float(x1 << 16 if half == 0 else x1 & -65536)
        sums += widened(((words >> (16 * half)) & 255).to(tl.uint8), 4) * low
        sums += widened(((words >> (16 * half + 8)) & 255).to(tl.uint8), 4) * high
    return sums


@triton.jit
def line_of(words, scales, n, line, height, end, TALL: tl.constexpr, TURN: tl.constexpr, TURNS: tl.constexpr):
    """Load weight row n: per iteration codes [lanes, 4] and scales [lanes, 1]; 0 from word `end` on."""
    lane, word = tl.arange(0, TURN // 4)[:, None], tl.arange(0, 4)[None, :]
    codes, factors = (), ()
    for turn in tl.static_range(TURNS):
        there = turn * TURN + lane * 4 < end
        codes += (tl.load(words + n * line + turn * TURN + lane * 4 + word, mask=there, other=0),)  # type: ignore[assignment]
        if scales is not None:
            at = scales + n // TALL * height + (turn * TURN + lane * 4) // 32
            factors += (tl.load(at, mask=there, other=0.0),)  # type: ignore[assignment]
    return codes, factors


@triton.jit
def columns_of(x, line, PAIRS: tl.constexpr, TURN: tl.constexpr, TURNS: tl.constexpr):
    """Load the columns of x that match a weight row's words: per iteration and place in 16 bits, two bfloat16 [lanes,
    4]."""
    lane, word = tl.arange(0, TURN // 4)[:, None], tl.arange(0, 4)[None, :]
    x_at, columns = x + lane // 4 * 32 + lane % 4 * 4 + word, ()
    for turn in tl.static_range(TURNS):
        there = turn * TURN + lane * 4 < line
        for place in tl.static_range(2):
            both = tl.load(x_at + turn * TURN * 2 + 16 * place, mask=there, other=0)
            if PAIRS:
                both = tl.inline_asm_elementwise(FURTHER, "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1)
            columns += (both,)  # type: ignore[assignment]
    return columns


@triton.jit
def two_lines(words, scales, row_scales, bias, n, m, line, height, n_in, m_in, TALL: tl.constexpr,
              TURN: tl.constexpr, TURNS: tl.constexpr):  # fmt: skip
    """Load codes, scales, row scales and biases of the weight rows n and m; a row whose mask is off gets zeros."""
    of_one, of_other, by_one, by_other = 0.0, 0.0, 1.0, 1.0
    if bias is not None:
        of_one = tl.load(bias + n, mask=n_in, other=0.0)
        of_other = tl.load(bias + m, mask=m_in, other=0.0)
    if row_scales is not None:
        by_one = tl.load(row_scales + n, mask=n_in, other=0.0)
        by_other = tl.load(row_scales + m, mask=m_in, other=0.0)
    one = line_of(words, scales, n, line, height, tl.where(n_in, line, 0), TALL, TURN, TURNS)
    other = line_of(words, scales, m, line, height, tl.where(m_in, line, 0), TALL, TURN, TURNS)
    return one, other, of_one, of_other, by_one, by_other


@triton.jit
def of_turn(
    one, other, tokens, factors, scales, turn: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """Return an iteration's scaled sums for both weight rows; with matrix units both are in the first result."""
    if PAIRS:
        if FORM == 0:
            operands = (one[0][turn], other[0][turn], tokens[2 * turn], tokens[2 * turn + 1])
            made = tl.inline_asm_elementwise(OF_WORDS, OPERANDS, operands, dtype=tl.float32, is_pure=True, pack=4)
        else:
            both = (one[0][turn], other[0][turn], tokens[turn])
            made = tl.inline_asm_elementwise(OF_CODES, CODE_OPERANDS, both, dtype=tl.float32, is_pure=True, pack=4)
        if scales is not None:
            of_first = tl.arange(0, 4)[None, :] < 2
            made *= tl.where(of_first, one[1][turn].to(tl.float32), other[1][turn].to(tl.float32))
        more = 0.0
    else:
        if FORM == 0:
            x0, x1 = tokens[2 * turn], tokens[2 * turn + 1]
            made, more = floats_met(one[0][turn], x0, x1), floats_met(other[0][turn], x0, x1)
        else:
            made, more = met(one[0][turn], tokens[turn], 4), met(other[0][turn], tokens[turn], 4)
        if scales is not None:
            made, more = made * one[1][turn].to(tl.float32), more * other[1][turn].to(tl.float32)
    if GROUPED:
        made, more = made * factors[turn], more * factors[turn]
    return made, more


@triton.jit
def one_of(own, other, is_other):
    """Return the pointer `other` if is_other, else `own`."""
    if is_other:
        own = other
    return own


@triton.jit
def token_of(pair, routed, TOP_K: tl.constexpr, SHARED: tl.constexpr):
    """The token of a pair; SHARED: pairs from `routed` on are those of the shared expert, one per token."""
    token = pair // TOP_K
    if SHARED:
        token = tl.where(pair < routed, token, pair - routed)
    return token


@triton.jit(do_not_specialize=["routed"])
def pairs_float8_kernel(
    out,  # [pairs, width]
    x,  # FLOATS, MADE: [rows, line * 2] int32, two bfloat16 each; without matrix units [rows, line * 4] floats;
    # CODES: [rows, line] int32
    x_scales,  # CODES: [groups, rows] float32; MADE: [] float32 when STATIC
    words,  # [experts * width, line] int32; for floats in gemm/widen's order; GATED [experts * 2 * width, line]
    scales,  # [.. / TALL, height], or None
    row_scales,  # [..] float32, or None
    bias,  # [..] float32, or None
    weights,  # [pairs] float32, factors for the sums of gate and of up; or None
    chosen,  # [routed] int32: the experts
    shared,  # words of the shared expert, or None; its pairs come last, one per token
    shared_scales,  # or None
    shared_row_scales,  # or None
    routed,  # pairs before those of the shared expert
    rows,  # rows of x: GATHER tokens, else pairs
    experts,
    width,
    runs,  # runs of 64 columns in a row
    height,  # length of a line of scales
    blocks,  # blocks of two weight rows per program
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    TALL: tl.constexpr,  # rows that share a line of scales
    TURN: tl.constexpr,  # words of a row that are read in one iteration
    TURNS: tl.constexpr,
    PAIRS: tl.constexpr,  # as in gemm/code_sums: whether matrix units multiply
    FORM: tl.constexpr,  # form of x, a constant of moe/pairs_codes
    GROUPED: tl.constexpr,  # x has scales per 128 columns
    STATIC: tl.constexpr,  # MADE: one number is the scale
    POWERS: tl.constexpr,  # MADE: scales are powers of two
    ROUNDS: tl.constexpr,  # MADE: an instruction rounds to e4m3
    OVERLAP: tl.constexpr,
):
    """A program computes `blocks` times two weight rows for a pair: a gate and an up row when GATED, else adjacent
    rows."""
    MATRICES: tl.constexpr = 2 if GATED else 1
    STEP: tl.constexpr = 1 if GATED else 2
    line = runs * 16  # this form shows the compiler that it is a multiple of 4
    pair, piece = tl.program_id(1), tl.program_id(0) * (blocks * STEP)
    end = tl.minimum(piece + blocks * STEP, width)
    if GATED:
        wait_then_allow(OVERLAP)
    expert = tl.load(chosen + (pair if shared is None else tl.minimum(pair, routed - 1)), cache_modifier=".cg")
    expert = expert.to(tl.int64)
    if shared is not None:
        expert = tl.where(pair < routed, expert, 0)
        words = one_of(words, shared, pair >= routed)
        if scales is not None:
            scales = one_of(scales, shared_scales, pair >= routed)
        if row_scales is not None:
            row_scales = one_of(row_scales, shared_row_scales, pair >= routed)
    first, second = expert * MATRICES * width, (expert * MATRICES + MATRICES - 1) * width + (STEP - 1)
    end = tl.where(expert < experts, end, 0)
    one, other, of_one, of_other, by_one, by_other = two_lines(
        words, scales, row_scales, bias, first + piece, second + piece, line, height, piece < end,
        piece + STEP - 1 < end, TALL, TURN, TURNS,
    )  # fmt: skip
    if not GATED:
        grid_wait(OVERLAP)
    if piece < end:
        token = (token_of(pair, routed, TOP_K, shared is not None) if GATHER else pair).to(tl.int64)
        tokens, factors, weight = (), (), 1.0
        if FORM == 0:
            tokens = columns_of(x + token * (runs * 32), line, PAIRS, TURN, TURNS)
        elif FORM == 1:
            tokens, factors, weight = tokens_of(x, x_scales, token, rows, line, GROUPED, TURN, TURNS)
        else:
            tokens, factors, weight = made_of(
                x, x_scales, None, 0.0, token, line, GROUPED, STATIC, POWERS, ROUNDS, -1, PAIRS, TURN, TURNS
            )  # fmt: skip
        if weights is not None:
            weight *= tl.load(weights + pair)
        at = out + pair.to(tl.int64) * width
        for _ in range(blocks):
            ahead = piece + STEP
            following = two_lines(
                words, scales, row_scales, bias, first + ahead, second + ahead, line, height, ahead < end,
                ahead + STEP - 1 < end, TALL, TURN, TURNS,
            )  # fmt: skip
            sums, others = tl.zeros([TURN // 4, 4], tl.float32), tl.zeros([TURN // 4, 4], tl.float32)
            for turn in tl.static_range(TURNS):
                made, more = of_turn(one, other, tokens, factors, scales, turn, PAIRS, FORM, GROUPED)
                sums, others = sums + made, others + more
            if PAIRS:
                sums, others = on_diagonals(sums)
                if FORM == 0:
                    sums, others = sums * FAR, others * FAR
            y = tl.sum(tl.sum(sums, 1), 0) * by_one * weight + of_one
            z = tl.sum(tl.sum(others, 1), 0) * by_other * weight + of_other
            if GATED:
                y = activate(y, z, ACT)
            else:
                tl.store(at + piece + 1, z.to(out.dtype.element_ty), mask=piece + 1 < end)
            tl.store(at + piece, y.to(out.dtype.element_ty), mask=piece < end)
            one, other, of_one, of_other, by_one, by_other = following
            piece = ahead


def suits(weight: Packed) -> bool:
    """Whether the kernel reads these codes: they have scales per 128 columns, per row, or both.

    The instruction requires that a thread holds four adjacent words of a row that are loaded together.
    """
    whole = weight.kind is Kind.E4M3 and weight.depth % BLOCK == 0 and weight.zeros is None and is_aligned(weight.codes)
    return whole and (weight.scales is None or weight.group == GROUP)


def takes(x: Tensor, weight: Packed, pairs: Pairs) -> bool:
    """Whether the kernel can multiply the rows x: there are few pairs, and the device runs the kernel's PTX."""
    return pairs.order is None and makes_pairs(x) and weight.words and suits(weight)


def scales_like(weight: Packed, shared: Packed) -> tuple[Tensor | None, Tensor | None]:
    """The scales and row scales of the shared expert in the form that the experts' have."""
    if weight.scales is None:
        return None, shared.row_scales
    return shared.scales if weight.tall == shared.tall else shared.blocks, shared.row_scales


def joins(weight: Packed, experts: int, shared: Packed) -> bool:
    """Whether the shared expert's matrix has the size of each expert's, and its scales can have the same form."""
    if shared.words or not suits(shared) or shared.codes.shape != (len(weight.codes) // experts, weight.depth):
        return False
    forms = [
        [None if each is None else (each.shape[1:], each.dtype) for each in scales]
        for scales in ((weight.scales, weight.row_scales), scales_like(weight, shared))
    ]
    return forms[0] == forms[1]


def launch_pairs_float8(
    x: Tensor | CodedRows, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs,
    activation: Activation | None, weights: Tensor | None = None, blocks: int | None = None,
    inputs: Inputs | None = None, dtype: torch.dtype = torch.bfloat16, shared: Packed | None = None,
) -> Tensor:  # fmt: skip
    """Launch the Triton kernel; arguments as moe/coded's product; x is bfloat16, its rows are aligned to 16 bytes.

    Or x is codes, and the result has `dtype`; or x is floats, and `inputs` defines how they are quantised.
    shared: the matrix of the shared expert, for which `joins` holds; the last rows are its results, one per token.
    """
    depth, gated = weight.depth, activation is not None
    coded, form = isinstance(x, CodedRows), inputs or Inputs()
    rows, x_scales = (x.codes, x.scales) if isinstance(x, CodedRows) else (x, form.scale)
    width, words = len(weight.codes) // experts // (2 if gated else 1), weight.codes.view(torch.int32)
    assert suits(weight) and words.shape[1] * WORD == depth and rows.shape[1] == depth
    assert weight.words == (inputs is None) and (not coded or inputs is not None)
    assert rows.is_contiguous() and is_aligned(rows) and is_aligned(words)
    assert bias is None or bias.dtype is torch.float32
    turns, step = triton.cdiv(depth // WORD, TURN), 1 if gated else 2
    kind = CODES if coded else FLOATS if inputs is None else MADE
    in_pairs = rows.is_cuda and target().runs_ptx if coded else makes_pairs(rows)
    # All programs run at the same time.
    programs = PROGRAMS[kind][0 if turns > 2 else 1] * target().num_units
    count = pairs.count + (0 if shared is None else len(pairs.chosen))
    blocks = blocks or triton.cdiv(width * count, step * programs)
    out = torch.empty(count, width, dtype=dtype if coded else rows.dtype, device=rows.device)
    of_shared = (None, None, None) if shared is None else (shared.codes.view(torch.int32), *scales_like(weight, shared))
    pairs_float8_kernel[(triton.cdiv(width, blocks * step), count)](
        out, rows.view(torch.int32) if kind != MADE or in_pairs else rows, x_scales, words, weight.scales,
        weight.row_scales, bias, weights, pairs.chosen, *of_shared, pairs.count, len(rows), experts, width,
        depth // BLOCK, 1 if weight.scales is None else weight.scales.shape[1], blocks, TOP_K=pairs.top_k,
        GATHER=gated, GATED=gated, ACT=int(activation or 0), TALL=weight.tall, TURN=TURN, TURNS=turns, PAIRS=in_pairs,
        FORM=kind, GROUPED=form.group > 0, STATIC=form.scale is not None, POWERS=form.powers,
        ROUNDS=target().widens_fp8, num_warps=1, num_stages=1, **launch_options(),
    )  # fmt: skip
    return out
