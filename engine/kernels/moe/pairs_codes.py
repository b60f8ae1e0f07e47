"""Inputs in FP8 for moe/pairs_float8: codes that are in memory, or floats that are quantised here.

A warp holds a whole row of x. In each iteration a thread holds four words: 16 of the 128 columns that share a scale.
Quantising a few rows in every program costs less than another launch. The codes equal those of gemm/quantise_floats.
Users: moe/pairs_float8.
"""

from __future__ import annotations

from engine.kernels.gemm.float8_row import of_words
from engine.kernels.gemm.one_row import as_float
from engine.kernels.gemm.quantise_floats import coded, scale_of, to_power
from engine.kernels.target import tl, triton

OF_CODES, CODE_OPERANDS = tl.constexpr(of_words()), tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12))
FLOATS, CODES, MADE = range(3)  # the constant FORM: floats that stay, codes, floats that become codes
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
def tokens_of(x, scales, token, rows, line, GROUPED: tl.constexpr, TURN: tl.constexpr, TURNS: tl.constexpr):
    """Load a row: per iteration words [lanes, 4] and, when GROUPED, column scales [lanes, 1]; then the row's scale."""
    lane, word = tl.arange(0, TURN // 4)[:, None], tl.arange(0, 4)[None, :]
    held, factors, factor = (), (), 1.0
    for turn in tl.static_range(TURNS):
        at = turn * TURN + lane * 4
        held += (tl.load(x + token * line + at + word, mask=at < line, other=0),)  # type: ignore[assignment]
        if GROUPED:
            factors += (tl.load(scales + at // 32 * rows + token, mask=at < line, other=0.0),)  # type: ignore[assignment]
    if not GROUPED:
        factor = tl.load(scales + token)
    return held, factors, factor


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
def made_of(
    x, given, token, line, GROUPED: tl.constexpr, STATIC: tl.constexpr, POWERS: tl.constexpr, ROUNDS: tl.constexpr,
    PAIRS: tl.constexpr, TURN: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Like `tokens_of`, but quantises floats x [rows, line * 4]; PAIRS: two bfloat16 per 32 bits, [rows, line * 2].

    Every load gives a lane four numbers, like the loads of weights: the instructions need them in the same thread.
    """
    LANES: tl.constexpr = TURN // 4
    lane, word, column = tl.arange(0, LANES)[:, None], tl.arange(0, 4)[None, :], tl.arange(0, 16)[None, :]
    values, most, highest = (), (), 0.0  # the loop lengthens the tuples, so mypy has no type for them
    for turn in tl.static_range(TURNS):
        at = turn * TURN + lane * 4
        if PAIRS:
            x_at = x + token * (line * 2) + at * 2 + word
            first, second = tl.load(x_at, mask=at < line, other=0), tl.load(x_at + 4, mask=at < line, other=0)
            values += ((first, second),)  # type: ignore[assignment]
            most += (highest_of(first, second),)  # type: ignore[assignment]
        else:
            each = tl.load(x + token * (line * 4) + at * 4 + column, mask=at < line, other=0.0).to(tl.float32)
            values += (each,)  # type: ignore[assignment]
            most += (tl.max(tl.abs(each), 1),)  # type: ignore[assignment]
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
