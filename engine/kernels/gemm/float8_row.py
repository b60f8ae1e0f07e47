"""Products of one row of FP8 codes with FP8 codes: gemm/float8 on the matrix unit's diagonals.

    rows     y[n] = s_x s_w[n] sum_k x[k] w[n, k]
    blocks   y[n] = sum_b s_x[b] s_w[n, b] sum_(k in b) x[k] w[n, k]       b: 128 columns

Both operands are e4m3. With one row the time is spent on reading the weight. A warp computes two weight rows, or
several warps share the columns of two rows, and codes go to the unit without moving between threads (gemm/diagonals).
In each iteration a thread's columns are within a block of 128 columns, so scales multiply sums, one per thread and
weight row, which are added in float32. Weights do not depend on the previous kernel, so a program loads its first rows
and scales before it waits for x. If x is floats, every program quantises it (gemm/made_codes), which costs less than a
launch before the product. Rows of gemm/epilogue's Unscaled are quantised undivided: the codes do not change if a row is
divided by its root mean square, and sums are divided. Further weight rows may be floats (a state layer's gates); one
program multiplies each.
Users: gemm/dispatch_float8, gemm/float8_weight.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.descriptors import is_aligned
from engine.kernels.gemm.diagonals import on_diagonals
from engine.kernels.gemm.epilogue import padded
from engine.kernels.gemm.float8 import BLOCK, Tile, float8_product_reference
from engine.kernels.gemm.groups import Packed, makes_pairs
from engine.kernels.gemm.made_codes import both_of, made_of
from engine.kernels.gemm.widen import E4M3, widened
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

WORD = 4  # codes of 32 bits
PER = tl.constexpr(BLOCK // WORD)  # words of 128 columns
TURN = 128  # words of a row that a warp reads per iteration, four per thread
TURNS = 8  # most iterations: a thread's registers hold two rows, and the next two
SMALL = 1 << 22  # numbers of a weight
SHARE = 1024  # columns per warp; more if a row needs more than four warps
BUSY = 40  # up to this number of warps per unit, a program computes one block


class RowsCut(NamedTuple):
    """How a product of one row is divided."""

    blocks: int  # blocks of two weight rows per program
    warps: int  # warps that share a row's columns


def of_words() -> str:
    """PTX: sums ($0 to $3) of four words of a weight row ($4 on) and of another ($8 on), times the words of x ($12
    on)."""
    text = "{ .reg .f32 c0, c1, c2, c3;" + "".join(f" mov.f32 c{at}, 0f00000000;" for at in range(4))
    for at in (0, 2):
        text += " mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {c0, c1, c2, c3},"
        text += f" {{${4 + at}, ${8 + at}, ${5 + at}, ${9 + at}}}, {{${12 + at}, ${13 + at}}}, {{c0, c1, c2, c3}};"
    return text + "".join(f" mov.f32 ${at}, c{at};" for at in range(4)) + " }"


OF_WORDS, OPERANDS = tl.constexpr(of_words()), tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12))


@triton.jit
def met(words, tokens, KIND: tl.constexpr):
    """Words [lanes, 4] of a weight row times x's words, in float32, for devices without e4m3 units."""
    sums = tl.zeros(words.shape, tl.float32)
    for at in tl.static_range(4):
        column = widened(((tokens >> (8 * at)) & 255).to(tl.uint8), KIND)
        column = tl.where(((tokens >> (8 * at)) & 0x7F) == 0x7F, float("nan"), column)
        sums += widened(((words >> (8 * at)) & 255).to(tl.uint8), KIND) * column
    return sums


@triton.jit
def line_of(codes, scales, words, SCALED: tl.constexpr, TURN: tl.constexpr, TURNS: tl.constexpr):
    """Loads a line of codes, [lanes, 4] words per iteration, and the scales of their columns [lanes, 1]."""
    lane, word = tl.arange(0, TURN // 4)[:, None], tl.arange(0, 4)[None, :]
    held, factors = (), ()
    for turn in tl.static_range(TURNS):
        at = turn * TURN + lane * 4
        held += (tl.load(codes + at + word, mask=at < words, other=0),)  # type: ignore[assignment]
        if SCALED:
            factors += (tl.load(scales + at // PER, mask=at < words, other=0.0),)  # type: ignore[assignment]
    return held, factors


@triton.jit
def two_lines(words, scales, bias, n, end, line, groups, BLOCKED: tl.constexpr, TURN: tl.constexpr,
              TURNS: tl.constexpr):  # fmt: skip
    """Loads codes, scales, biases and row scales of the weight rows n and n + 1; zeros from `end` on."""
    at, behind = n.to(tl.int64), n.to(tl.int64) + 1
    of_one, of_other, by_one, by_other = 0.0, 0.0, 1.0, 1.0
    if bias is not None:
        of_one = tl.load(bias + at, mask=n < end, other=0.0)
        of_other = tl.load(bias + behind, mask=n + 1 < end, other=0.0)
    if not BLOCKED:
        by_one = tl.load(scales + at, mask=n < end, other=0.0)
        by_other = tl.load(scales + behind, mask=n + 1 < end, other=0.0)
    own = groups if BLOCKED else 0
    one = line_of(words + at * line, scales + at * own, tl.where(n < end, line, 0), BLOCKED, TURN, TURNS)
    other = line_of(words + behind * line, scales + behind * own, tl.where(n + 1 < end, line, 0), BLOCKED, TURN, TURNS)
    return one, other, of_one, of_other, by_one, by_other


@triton.jit
def root_of(squares, parts, columns, eps, PARTS: tl.constexpr):
    """1 / the root mean square of a row of Unscaled."""
    part = tl.arange(0, PARTS)
    return 1.0 / tl.sqrt_rn(tl.sum(tl.load(squares + part, mask=part < parts, other=0.0), 0) / columns + eps)


@triton.jit
def float_row(
    out, x, squares, row, line, parts, eps, PAIRS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiplies x by one row of floats, COLUMNS of its DEPTH numbers at a time."""
    size = line * (2 if PAIRS else 4)
    TURNS: tl.constexpr = (DEPTH + COLUMNS - 1) // COLUMNS
    k = tl.arange(0, COLUMNS)
    held = ()
    for turn in tl.static_range(TURNS):
        at = turn * COLUMNS + k
        held += (tl.load(row + at, mask=at < size, other=0),)  # type: ignore[assignment]
    grid_wait(OVERLAP)
    root = root_of(squares, parts, line * 4, eps, PARTS)
    total = tl.zeros([COLUMNS], tl.float32)
    for turn in tl.static_range(TURNS):
        at = turn * COLUMNS + k
        tokens = tl.load(x + at, mask=at < size, other=0)
        if PAIRS:
            low, high = both_of(held[turn])
            token_low, token_high = both_of(tokens)
            total += low * token_low + high * token_high
        else:
            total += held[turn].to(tl.float32) * tokens.to(tl.float32)
    tl.store(out, (tl.sum(total, 0) * root).to(out.dtype.element_ty))


@triton.jit
def float8_row_kernel(
    out,  # [width + rows of `further`]
    x,  # [runs * 4] int32 words of codes; MADE: [runs * 16] floats, or [runs * 8] int32 of two bfloat16 when PAIRS
    x_scales,  # [groups] float32; MADE: [] float32 when STATIC
    gain,  # [runs * 16] float32: the norm of x is quantised; or None
    squares,  # [parts] float32 if x is Unscaled; or None
    words,  # [width, runs * 4] int32
    scales,  # [width, groups]
    bias,  # [width] or None
    residual,  # [width], or None; may be out
    further,  # [rows, runs * 16] floats like x, with `squares`; or None
    width,
    parts,
    programs,  # that multiply codes
    runs,  # runs of 16 columns in a row
    groups,  # groups of 128 columns when BLOCKED, else 1
    blocks,  # blocks of two weight rows per program
    eps,
    BLOCKED: tl.constexpr,
    NATIVE: tl.constexpr,  # matrix units multiply e4m3
    KIND: tl.constexpr,  # e4m3's number in gemm/widen
    MADE: tl.constexpr,  # x is quantised here
    ACT: tl.constexpr,  # an Activation: x is gate, then up; -1: none
    STATIC: tl.constexpr,  # STATIC, POWERS: as in gemm/quantise_floats
    POWERS: tl.constexpr,
    ROUNDS: tl.constexpr,  # an instruction rounds to e4m3
    PAIRS: tl.constexpr,
    TURN: tl.constexpr,  # words of a row that are read at a time
    TURNS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two >= parts
    DEPTH: tl.constexpr,  # numbers in a row of floats: two columns each when PAIRS
    OVERLAP: tl.constexpr,
):
    """Computes `blocks` times two weight rows per program; the next two rows are loaded meanwhile."""
    line = runs * 4  # written in this way, so that the compiler knows that words come in fours
    number = tl.program_id(0) - programs
    if further is None or number < 0:
        code_rows(
            out, x, x_scales, gain, squares, words, scales, bias, residual, width, parts, line, groups, blocks, eps,
            BLOCKED, NATIVE, KIND, MADE, ACT, STATIC, POWERS, ROUNDS, PAIRS, TURN, TURNS, PARTS, OVERLAP,
        )  # fmt: skip
    else:
        row = further + number * (line * (2 if PAIRS else 4))
        float_row(out + width + number, x, squares, row, line, parts, eps, PAIRS, PARTS, DEPTH, TURN, OVERLAP)


@triton.jit
def code_rows(
    out, x, x_scales, gain, squares, words, scales, bias, residual, width, parts, line, groups, blocks, eps,
    BLOCKED: tl.constexpr, NATIVE: tl.constexpr, KIND: tl.constexpr, MADE: tl.constexpr, ACT: tl.constexpr,
    STATIC: tl.constexpr, POWERS: tl.constexpr, ROUNDS: tl.constexpr, PAIRS: tl.constexpr, TURN: tl.constexpr,
    TURNS: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The program's rows of codes."""
    piece = tl.program_id(0) * (blocks * 2)
    end = tl.minimum(piece + blocks * 2, width)
    one, other, of_one, of_other, by_one, by_other = two_lines(
        words, scales, bias, piece, end, line, groups, BLOCKED, TURN, TURNS
    )
    grid_wait(OVERLAP)
    if MADE:
        tokens, factors, factor = made_of(
            x, x_scales, gain, eps, 0, line, BLOCKED, STATIC, POWERS, ROUNDS, ACT, PAIRS, TURN, TURNS
        )
    else:
        tokens, factors = line_of(x, x_scales, line, BLOCKED, TURN, TURNS)
        factor = 1.0
        if not BLOCKED:
            factor = tl.load(x_scales)
    if squares is not None:
        factor *= root_of(squares, parts, line * 4, eps, PARTS)
    for _ in range(blocks):
        ahead, y, z = piece + 2, 0.0, 0.0
        following = two_lines(words, scales, bias, ahead, end, line, groups, BLOCKED, TURN, TURNS)
        if residual is not None:
            y = tl.load(residual + piece, mask=piece < end, other=0.0).to(tl.float32)
            z = tl.load(residual + piece + 1, mask=piece + 1 < end, other=0.0).to(tl.float32)
        sums, others = tl.zeros([TURN // 4, 4], tl.float32), tl.zeros([TURN // 4, 4], tl.float32)
        for turn in tl.static_range(TURNS):
            if NATIVE:
                operands = (one[0][turn], other[0][turn], tokens[turn])
                made = tl.inline_asm_elementwise(OF_WORDS, OPERANDS, operands, dtype=tl.float32, is_pure=True, pack=4)
                if BLOCKED:
                    of_first = tl.arange(0, 4)[None, :] < 2
                    made *= tl.where(of_first, one[1][turn].to(tl.float32), other[1][turn].to(tl.float32))
                    made *= factors[turn]
                sums += made
            else:
                made, more = met(one[0][turn], tokens[turn], KIND), met(other[0][turn], tokens[turn], KIND)
                if BLOCKED:
                    made *= one[1][turn].to(tl.float32) * factors[turn]
                    more *= other[1][turn].to(tl.float32) * factors[turn]
                sums, others = sums + made, others + more
        if NATIVE:
            sums, others = on_diagonals(sums)
        y += tl.sum(tl.sum(sums, 1), 0) * (by_one * factor) + of_one
        z += tl.sum(tl.sum(others, 1), 0) * (by_other * factor) + of_other
        tl.store(out + piece, y.to(out.dtype.element_ty), mask=piece < end)
        tl.store(out + piece + 1, z.to(out.dtype.element_ty), mask=piece + 1 < end)
        one, other, of_one, of_other, by_one, by_other = following
        piece = ahead


def takes(x: Tensor, weight: Packed) -> bool:
    """Whether the kernel multiplies these rows of codes [M, K] on this device."""
    aligned = is_aligned(x) and is_aligned(weight.codes)  # a thread's four words are loaded together
    return len(x) == 1 and x.is_cuda and target().runs_ptx and aligned and weight.depth % (4 * WORD) == 0


def cut_of(width: int, depth: int, units: int) -> RowsCut:
    """The division of a product: the fastest, or nearly, of those tried on an H100 with Qwen3-8B and 30B-A3B."""
    least = triton.next_power_of_2(triton.cdiv(depth, TURNS * TURN * WORD))
    warps = max(least, min(4, triton.next_power_of_2(triton.cdiv(depth, SHARE))))
    return RowsCut(2 if width * warps > 2 * BUSY * units else 1, warps)


def float8_row_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    cut: RowsCut | None = None,
) -> None:  # fmt: skip
    """Codes x [1, K] and x_scales [groups, 1] times the weight [N, K] into out [1, N]; residual [1, N], may be out."""
    if x.is_cuda:
        launch_float8_row_product(x, x_scales, weight, bias, residual, out, cut, target().multiplies_float8)
    else:
        float8_product_reference(x, x_scales, weight, bias, residual, out, Tile(16, 64, BLOCK, BLOCK, 1, 4))


class Floats(NamedTuple):
    """A row of floats and how it becomes the codes that are multiplied."""

    x: Tensor  # [1, K]; with an activation [1, 2K]: gate, then up
    inputs: Inputs
    gain: Tensor | None = None  # [K]: rms_norm(x, gain, eps) is quantised
    eps: float = 0.0
    activation: Activation | None = None
    squares: Tensor | None = None  # [parts, 1] float32: x is the rows of gemm/epilogue's Unscaled


def takes_floats(floats: Floats, weight: Packed) -> bool:
    """Whether the kernel quantises and multiplies this row faster than two kernels: measured on an H200.

    Every program repeats a norm or an activation, which costs more than a launch if there are many programs.
    """
    device = target()
    if not (device.multiplies_float8 and device.widens_fp8 and makes_pairs(floats.x) and takes(floats.x, weight)):
        return False
    plain = floats.gain is None and floats.activation is None
    return plain or len(weight.codes) * weight.depth <= SMALL


def takes_unscaled(inputs: Inputs) -> bool:
    """Whether a row's codes stay the same if the row is divided by a number."""
    return inputs.scale is None and not inputs.powers


def cut_of_floats(width: int, depth: int, units: int) -> RowsCut:
    """Like `cut_of`: fewer warps share a row if there are many programs, because each quantises the whole row."""
    blocks, warps = cut_of(width, depth, units)
    least = triton.next_power_of_2(triton.cdiv(depth, TURNS * TURN * WORD))
    return RowsCut(blocks, max(least, warps // 2) if width * warps > 4 * BUSY * units else warps)


def launch_float8_row_of_floats(
    floats: Floats, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    cut: RowsCut | None = None, native: bool = True, pairs: bool = True, further: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantises the row and multiplies it: arguments as `launch_float8_row_product`; pairs: x is read in 32 bits.

    further [rows, K] of x's dtype: weight rows whose products, with `squares` only, come last in `out`.
    """
    x, inputs, gain, eps, activation, squares = floats
    depth = x.shape[1] // (1 if activation is None else 2)
    assert x.shape[0] == 1 and x.is_contiguous() and depth == weight.depth
    assert bool(inputs.group) == (weight.scales is not None) and inputs.group in (0, BLOCK)
    assert gain is None or (activation is None and gain.shape == (depth,))
    assert squares is None or (takes_unscaled(inputs) and gain is None and activation is None)
    assert further is None or (squares is not None and residual is None and further.dtype is x.dtype)
    made = {
        "MADE": True, "ACT": -1 if activation is None else int(activation), "STATIC": inputs.scale is not None,
        "POWERS": inputs.powers, "ROUNDS": native, "PAIRS": pairs,
    }  # fmt: skip
    row, cut = x.view(torch.int32) if pairs else x, cut or cut_of_floats(len(weight.codes), depth, target().num_units)
    if further is not None:
        assert further.is_contiguous() and further.shape[1] == depth
        further = further.view(torch.int32) if pairs else further
    _launch(row, inputs.scale, gain, eps, weight, bias, residual, out, cut, native, made, squares, further)


def launch_float8_row_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    cut: RowsCut | None = None, native: bool = False,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as `float8_row_product`. `native`: matrix units multiply e4m3."""
    groups = -(-weight.depth // BLOCK) if weight.scales is not None else 1
    assert x.shape == (1, weight.depth) and x.is_contiguous()
    assert x_scales.shape == (groups, 1) and x_scales.is_contiguous()
    plain = {"MADE": False, "ACT": -1, "STATIC": False, "POWERS": False, "ROUNDS": False, "PAIRS": False}
    _launch(x.view(torch.int32), x_scales, None, 0.0, weight, bias, residual, out, cut, native, plain)


def _launch(
    x: Tensor, x_scales: Tensor | None, gain: Tensor | None, eps: float, weight: Packed, bias: Tensor | None,
    residual: Tensor | None, out: Tensor, cut: RowsCut | None, native: bool, constants: dict[str, Any],
    squares: Tensor | None = None, further: Tensor | None = None,
) -> None:  # fmt: skip
    width, depth, blocked = len(weight.codes), weight.depth, weight.scales is not None
    scales = weight.row_scales if weight.scales is None else weight.scales
    groups = -(-depth // BLOCK) if blocked else 1
    more, parts = 0 if further is None else len(further), 0 if squares is None else len(squares)
    assert depth % (4 * WORD) == 0 and out.shape == (1, width + more)
    assert scales is not None and (blocked == (weight.row_scales is None)) and scales.numel() == width * groups
    cut = cut or cut_of(width, depth, target().num_units)
    turn, words = TURN * cut.warps, weight.codes.view(torch.int32)
    programs = triton.cdiv(width, 2 * cut.blocks)
    float8_row_kernel[(programs + more,)](
        out, x, x_scales, gain, squares, words, scales, bias, residual, further, width, parts, programs,
        depth // (4 * WORD), groups, cut.blocks, eps,
        BLOCKED=blocked, NATIVE=native, KIND=E4M3, TURN=turn, TURNS=triton.cdiv(depth // WORD, turn),
        PARTS=padded(parts, 1) if parts else 0, DEPTH=depth // (2 if constants["PAIRS"] else 1) if more else 0,
        num_warps=cut.warps, num_stages=1, **constants, **launch_options(),
    )  # fmt: skip
