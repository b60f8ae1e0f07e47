"""Quantises a row to FP8 in the program that multiplies it: no launch is needed before the product.

The codes equal those of gemm/quantise_floats. The row is that of the stream, or its norm, or activate(gate, up); norm
and activation are rounded to the row's dtype before they are quantised, as if a kernel had written them. A program
holds the whole row. In each iteration a thread holds four words of codes: 16 of the 128 columns that share a scale.
Quantising a few rows in every program costs less than another launch. Users: gemm/float8_row, moe/pairs_float8.
"""

from __future__ import annotations

from engine.kernels.activation import activate
from engine.kernels.gemm.one_row import as_float
from engine.kernels.gemm.quantise_floats import coded, scale_of, to_power
from engine.kernels.target import tl, triton

HIGHER = tl.constexpr("{ .reg .b32 one, other; abs.bf16x2 one, $1; abs.bf16x2 other, $2; max.bf16x2 $0, one, other; }")
LEAST = tl.constexpr(2.0**-126)  # a smaller scale has no reciprocal in float32


def to_words() -> str:
    """Return PTX that makes four words of codes ($0 to $3): the bfloat16 in $4 to $11 times $16 (both halves), times
    $12."""
    text = "{ .reg .b32 pair, half, zero; .reg .f32 low, high; .reg .b16 first, second; mov.b32 zero, 0x80008000;"
    for word in range(4):
        for name, at in (("first", 4 + 2 * word), ("second", 5 + 2 * word)):
            text += f" fma.rn.bf16x2 pair, ${at}, $16, zero; shl.b32 half, pair, 16; mov.b32 low, half;"
            text += " and.b32 half, pair, 0xffff0000; mov.b32 high, half; mul.f32 low, low, $12;"
            text += f" mul.f32 high, high, $12; cvt.rn.satfinite.e4m3x2.f32 {name}, high, low;"
        text += f" mov.b32 ${word}, {{first, second}};"
    return text + " }"


TO_WORDS = tl.constexpr(to_words())
WORD_OPERANDS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 8 + ["f"] * 4 + ["r"] * 4))


@triton.jit
def highest_of(first, second):
    """Return the highest magnitude of each lane's 16 bfloat16: [lanes]."""
    pairs = tl.inline_asm_elementwise(HIGHER, "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    return tl.max(tl.maximum(as_float(pairs << 16), as_float(pairs & -65536)), 1)


@triton.jit
def words_of(first, second, scale):
    """Quantise each lane's 16 bfloat16 by scale [lanes, 1] to words [lanes, 4]; quotients are rounded as by tl.fdiv."""
    small = tl.broadcast_to(scale < LEAST, first.shape)
    by = tl.fdiv(1.0, tl.where(small, scale * 16777216.0, scale))
    wider = tl.where(small, 0x4B804B80, 0x3F803F80)  # 2^24 or 1 in both halves
    operands = (first, second, by, wider)
    return tl.inline_asm_elementwise(TO_WORDS, WORD_OPERANDS, operands, dtype=tl.int32, is_pure=True, pack=4)


@triton.jit
def codes_of(values, scale, ROUNDS: tl.constexpr):
    """Quantise values [lanes, 16] in float32 like `words_of`, for devices without its instructions."""
    codes = coded(values, tl.broadcast_to(scale, values.shape), ROUNDS).to(tl.int32)
    places = tl.reshape(codes, [values.shape[0], 4, 4]) << (8 * tl.arange(0, 4))[None, None, :]
    return tl.sum(places, 2)


@triton.jit
def both_of(pairs):
    """The two bfloat16 of each 32 bits, in float32: of the lower half, of the upper half."""
    return as_float(pairs << 16), as_float(pairs & -65536)


@triton.jit
def in_pairs(low, high):
    """Rounds float32 to bfloat16, two to 32 bits."""
    first = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    return first | (high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pairs_at(x, at, inside, line, ACT: tl.constexpr):
    """Loads four pairs of columns from `at` on; with ACT of activate(gate, up), `up` is 2 * line pairs further on."""
    pairs = tl.load(x + at, mask=inside, other=0)
    if ACT >= 0:
        low, high = both_of(pairs)
        up_low, up_high = both_of(tl.load(x + line * 2 + at, mask=inside, other=0))
        pairs = in_pairs(activate(low, up_low, ACT), activate(high, up_high, ACT))
    return pairs


@triton.jit
def floats_at(x, at, inside, line, ACT: tl.constexpr):
    """Like `pairs_at` for columns, in float32."""
    found = tl.load(x + at, mask=inside, other=0.0)
    each = found.to(tl.float32)
    if ACT >= 0:
        up = tl.load(x + line * 4 + at, mask=inside, other=0.0).to(tl.float32)
        each = activate(each, up, ACT).to(found.dtype).to(tl.float32)
    return each


@triton.jit
def squares_of(pairs):
    """The sum of both squares of each pair."""
    low, high = both_of(pairs)
    return low * low + high * high


@triton.jit
def normed_pairs(pairs, gain, at, inside, factor):
    """pairs * factor * gain, rounded to bfloat16; `at`: the first column of each pair."""
    low, high = both_of(pairs)
    low = low * factor * tl.load(gain + at, mask=inside, other=0.0)
    return in_pairs(low, high * factor * tl.load(gain + at + 1, mask=inside, other=0.0))


@triton.jit
def row_of(x, gain, eps, token, line, ACT: tl.constexpr, PAIRS: tl.constexpr, TURN: tl.constexpr,
           TURNS: tl.constexpr):  # fmt: skip
    """Loads a row, or makes it: per iteration two words of pairs [lanes, 4] when PAIRS, else floats [lanes, 16].

    Every load gives a lane four numbers, like the loads of weights: the instructions need them in the same thread.
    """
    lane, word, column = tl.arange(0, TURN // 4)[:, None], tl.arange(0, 4)[None, :], tl.arange(0, 16)[None, :]
    x += token * (line * (2 if PAIRS else 4) * (2 if ACT >= 0 else 1))
    values, squares = (), 0.0  # the loop lengthens the tuple, so mypy has no type for it
    for turn in tl.static_range(TURNS):
        at = turn * TURN + lane * 4
        if PAIRS:
            first = pairs_at(x, at * 2 + word, at < line, line, ACT)
            second = pairs_at(x, at * 2 + word + 4, at < line, line, ACT)
            values += ((first, second),)  # type: ignore[assignment]
            if gain is not None:
                squares += squares_of(first) + squares_of(second)
        else:
            each = floats_at(x, at * 4 + column, at < line, line, ACT)
            values += (each,)  # type: ignore[assignment]
            if gain is not None:
                squares += each * each
    if gain is not None:
        factor = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0) / (line * 4) + eps)
        rows, values = values, ()
        for turn in tl.static_range(TURNS):
            at = turn * TURN + lane * 4
            if PAIRS:
                first = normed_pairs(rows[turn][0], gain, at * 4 + 2 * word, at < line, factor)
                second = normed_pairs(rows[turn][1], gain, at * 4 + 2 * word + 8, at < line, factor)
                values += ((first, second),)  # type: ignore[assignment]
            else:
                each = rows[turn] * factor * tl.load(gain + at * 4 + column, mask=at < line, other=0.0)
                values += (each.to(x.dtype.element_ty).to(tl.float32),)  # type: ignore[assignment]
    return values


@triton.jit
def made_of(
    x, given, gain, eps, token, line, GROUPED: tl.constexpr, STATIC: tl.constexpr, POWERS: tl.constexpr,
    ROUNDS: tl.constexpr, ACT: tl.constexpr, PAIRS: tl.constexpr, TURN: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Quantises a row: per iteration words [lanes, 4] and, when GROUPED, column scales [lanes, 1]; the row's scale.

    x: rows of line * 4 floats, or of line * 2 pairs of bfloat16 in 32 bits when PAIRS, twice as long with ACT. With a
    gain [line * 4] the row's norm is quantised. given: [] float32 when STATIC.
    """
    LANES: tl.constexpr = TURN // 4
    values = row_of(x, gain, eps, token, line, ACT, PAIRS, TURN, TURNS)
    most, highest = (), 0.0
    for turn in tl.static_range(TURNS):
        if PAIRS:
            most += (highest_of(values[turn][0], values[turn][1]),)  # type: ignore[assignment]
        else:
            most += (tl.max(tl.abs(values[turn]), 1),)  # type: ignore[assignment]
        highest = tl.maximum(highest, tl.max(most[turn], 0))
    held, factors, factor = (), (), 1.0
    if STATIC:
        factor = to_power(tl.load(given), POWERS)
    elif not GROUPED:
        factor = scale_of(highest, POWERS)
    for turn in tl.static_range(TURNS):
        scale = tl.full([LANES, 1], 1.0, tl.float32) * factor
        if GROUPED:
            shared = tl.max(tl.reshape(most[turn], [LANES // 8, 8]), 1)
            shared = tl.reshape(tl.broadcast_to(shared[:, None], [LANES // 8, 8]), [LANES])
            scale = scale_of(shared, POWERS)[:, None]
            factors += (scale,)  # type: ignore[assignment]
        if PAIRS:
            held += (words_of(values[turn][0], values[turn][1], scale),)  # type: ignore[assignment]
        else:
            held += (codes_of(values[turn], scale, ROUNDS),)  # type: ignore[assignment]
    return held, factors, factor
