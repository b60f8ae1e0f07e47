"""Inputs in FP8 for moe/pairs_float8 whose codes are in memory.

A warp holds a whole row of x. In each iteration a thread holds four words: 16 of the 128 columns that share a scale.
Users: moe/pairs_float8.
"""

from __future__ import annotations

from engine.kernels.gemm.float8_row import of_words
from engine.kernels.target import tl, triton

OF_CODES, CODE_OPERANDS = tl.constexpr(of_words()), tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12))
FLOATS, CODES, MADE = range(3)  # the constant FORM: floats that stay, codes, floats that become codes


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
