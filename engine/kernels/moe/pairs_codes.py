"""What the words of a weight row meet where inputs are FP8 too: codes that lie in memory, or are made of floats here.

A warp holds a whole row of x, and a thread of each turn four words: 16 columns, of 128 that share a scale. Making the
codes of a few rows in every program costs less than another launch. The codes are those of gemm/quantise_floats.
Users: moe/pairs_float8.
"""

from __future__ import annotations

from engine.kernels.gemm.float8_row import of_words
from engine.kernels.gemm.quantise_floats import coded, scale_of, to_power
from engine.kernels.target import tl, triton

OF_CODES, CODE_OPERANDS = tl.constexpr(of_words()), tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12))
KEPT, CODES, MADE = range(3)  # the constant FORM: floats that stay, codes, floats that become codes


@triton.jit
def tokens_of(x, scales, token, rows, line, GROUPED: tl.constexpr, TURN: tl.constexpr, TURNS: tl.constexpr):
    """A row's words, each turn's [lanes, 4]; the scales of their columns [lanes, 1] when GROUPED; the row's."""
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
def made_of(
    x, given, token, line, GROUPED: tl.constexpr, STATIC: tl.constexpr, POWERS: tl.constexpr, ROUNDS: tl.constexpr,
    TURN: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """As `tokens_of`, of floats x [rows, line * 4]."""
    LANES: tl.constexpr = TURN // 4
    lane, column = tl.arange(0, LANES)[:, None], tl.arange(0, 16)[None, :]
    values, highest = (), 0.0
    for turn in tl.static_range(TURNS):
        at = turn * TURN + lane * 4
        each = tl.load(x + token * (line * 4) + at * 4 + column, mask=at < line, other=0.0).to(tl.float32)
        values += (each,)  # type: ignore[assignment]
        highest = tl.maximum(highest, tl.max(tl.max(tl.abs(each), 1), 0))
    held, factors, factor = (), (), 1.0
    if STATIC:
        factor = to_power(tl.load(given), POWERS)
    elif not GROUPED:
        factor = scale_of(highest, POWERS)
    for turn in tl.static_range(TURNS):
        scale = tl.full([LANES, 1], 1.0, tl.float32) * factor
        if GROUPED:
            most = tl.max(tl.reshape(tl.max(tl.abs(values[turn]), 1), [LANES // 8, 8]), 1)
            most = tl.reshape(tl.broadcast_to(most[:, None], [LANES // 8, 8]), [LANES])
            scale = scale_of(most, POWERS)[:, None]
            factors += (scale,)  # type: ignore[assignment]
        codes = coded(values[turn], tl.broadcast_to(scale, [LANES, 16]), ROUNDS).to(tl.int32)
        places = tl.reshape(codes, [LANES, 4, 4]) << (8 * tl.arange(0, 4))[None, None, :]
        held += (tl.sum(places, 2),)  # type: ignore[assignment]
    return held, factors, factor
