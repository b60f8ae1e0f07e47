"""code_sums: rows of codes times rows of x; the inner loop of every product that widens codes in registers.

A tile of words (gemm/widen) is widened to x's dtype before the matrix units, which sum in float32. There is one matrix
product for each code position in a word, over the columns at that position. If all columns of a product share a scale,
the scale multiplies the sums; scales of fewer columns multiply the values, which rounds them once more.
Users: gemm/groups, moe/coded.
"""

from __future__ import annotations

from engine.kernels.gemm.widen import BLOCK, codes_per_word, less, values_less, values_of
from engine.kernels.target import tl, triton


def block_k_of(kind: int, group: int, size: int) -> int:
    """Columns read at a time, for values of x of `size` bytes: 64 for groups of fewer than 128 columns, else 128."""
    return BLOCK if size > 2 or (group % (2 * BLOCK) and scales_sums(kind, group, BLOCK)) else 2 * BLOCK


def scales_sums(kind: int, group: int, block_k: int) -> bool:
    """Whether scales multiply sums: the constant ON_SUMS."""
    return group % block_k == 0 or (block_k == BLOCK and BLOCK % group == 0 and group * codes_per_word(kind) >= BLOCK)


@triton.jit
def numbers_of_groups(lines, n_in, at, groups, COUNT: tl.constexpr):
    """Values of groups at .. at + COUNT - 1 for the rows at `lines`: [n, COUNT], 0 beyond the last group."""
    group = at + tl.arange(0, COUNT)
    return tl.load(lines[:, None] + group[None, :], mask=n_in[:, None] & (group < groups)[None, :], other=0)


@triton.jit
def of_group(numbers, AT: tl.constexpr, COUNT: tl.constexpr):
    """Column AT of [n, COUNT] as [n, 1]."""
    if COUNT == 4:
        even, odd = tl.split(numbers.reshape((numbers.shape[0], 2, 2)))
        first, second = tl.split(odd if AT % 2 else even)
        chosen = second if AT // 2 else first
    elif COUNT == 2:
        first, second = tl.split(numbers)
        chosen = second if AT else first
    else:
        chosen = numbers.reshape((numbers.shape[0],))
    return chosen[:, None]


@triton.jit
def by_columns(values, columns, scales, zeros, n, n_in, depth, groups, GROUP: tl.constexpr, SCALES: tl.constexpr,
               ZEROS: tl.constexpr):  # fmt: skip
    """(values [n, columns] - zeros) * scales, with zeros and scales loaded for each value."""
    at, mask = (n.to(tl.int64) * groups)[:, None] + (columns // GROUP)[None, :], n_in[:, None] & (columns < depth)[None]
    if ZEROS:
        values = less(values, tl.load(zeros + at, mask=mask, other=0), False)
    if SCALES:
        values = (values.to(tl.float32) * tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def code_sums(
    n, n_in, m, m_in, x, words, scales, zeros, start, end, depth, line, groups, x_stride, KIND: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ON_SUMS: tl.constexpr, PAIRS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns start .. end - 1 of rows n of the words times rows m of x: float32 [BLOCK_N, BLOCK_M].

    PAIRS: x is bfloat16, and instructions make two values from two words. EVEN: `depth` is a multiple of BLOCK_K.
    Scales and zeros are loaded an iteration early, because the compiler's pipeline does not include these loads.
    """
    PER: tl.constexpr = 4 if KIND < 3 else 2  # codes of a word
    APART: tl.constexpr = 64 // PER  # columns between two codes of a word
    # Codes of a word that share a scale, and the number of scales per iteration.
    RUN: tl.constexpr = PER if GROUP % BLOCK_K == 0 else GROUP // APART if GROUP >= APART else 1
    COUNT: tl.constexpr = PER // RUN
    dtype: tl.constexpr = x.dtype.element_ty
    word_line = words + n.to(tl.int64)[:, None] * line
    x_line = x + m.to(tl.int64)[None, :] * x_stride
    scale_line, zero_line = scales + n.to(tl.int64) * groups, zeros + n.to(tl.int64) * groups
    j = tl.arange(0, BLOCK_K // PER)
    offset = j // APART * 64 + j % APART
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SCALES and ON_SUMS:
        scale = numbers_of_groups(scale_line, n_in, start // GROUP, groups, COUNT)
    if ZEROS and ON_SUMS:
        zero = numbers_of_groups(zero_line, n_in, start // GROUP, groups, COUNT)
    for first in range(start, end, BLOCK_K):
        if SCALES and ON_SUMS:
            next_scale = numbers_of_groups(scale_line, n_in, (first + BLOCK_K) // GROUP, groups, COUNT)
        if ZEROS and ON_SUMS:
            next_zero = numbers_of_groups(zero_line, n_in, (first + BLOCK_K) // GROUP, groups, COUNT)
        word = first // PER + j
        word_mask = n_in[:, None]
        if not EVEN:
            word_mask = word_mask & (word < line)[None, :]
        tile = tl.load(word_line + word[None, :], mask=word_mask, other=0)
        product = sums
        for place in tl.static_range(PER):
            columns = first + offset + place * APART
            x_mask = m_in[None, :]
            if not EVEN:
                x_mask = x_mask & (columns < depth)[:, None]
            tokens = tl.load(x_line + columns[:, None], mask=x_mask, other=0.0)
            if ZEROS and ON_SUMS:
                values = values_less(tile, of_group(zero, place // RUN, COUNT), dtype, KIND, place, PAIRS)
            else:
                values = values_of(tile, dtype, KIND, place, PAIRS)
            if not ON_SUMS:
                values = by_columns(values, columns, scales, zeros, n, n_in, depth, groups, GROUP, SCALES, ZEROS)
            if not (SCALES and ON_SUMS):
                sums = tl.dot(values, tokens, sums, input_precision="ieee")
            else:
                if place % RUN == 0:
                    product = tl.dot(values, tokens, input_precision="ieee")
                else:
                    product = tl.dot(values, tokens, product, input_precision="ieee")
                if place % RUN == RUN - 1:
                    sums += product * of_group(scale, place // RUN, COUNT).to(tl.float32)
        if SCALES and ON_SUMS:
            scale = next_scale
        if ZEROS and ON_SUMS:
            zero = next_zero
    return sums


@triton.jit
def integer_sums(
    n, n_in, m, m_in, x, codes, start, end, depth, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns start .. end - 1 of rows n of int8 codes times rows m of int8 x: exact int32 [BLOCK_N, BLOCK_M]."""
    code_line = codes + n.to(tl.int64)[:, None] * depth
    x_line = x + m.to(tl.int64)[None, :] * x_stride
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for first in range(start, end, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        inside = columns < depth
        each = tl.load(code_line + columns[None, :], mask=n_in[:, None] & inside[None, :], other=0)
        tokens = tl.load(x_line + columns[:, None], mask=m_in[None, :] & inside[:, None], other=0)
        sums = tl.dot(each, tokens, sums, out_dtype=tl.int32)
    return sums
