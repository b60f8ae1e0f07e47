"""code_sums: rows of codes times rows of x, the inner loop of every product that widens codes in registers.

A tile of words (gemm/widen) becomes numbers of x's dtype on its way to the matrix units, which sum in float32: one
product for each code of a word, over the columns that these codes stand for. A scale that all columns of such a product
share multiplies its sums; scales of fewer columns multiply values, which are rounded once more.
Users: gemm/groups, moe/coded.
"""

from __future__ import annotations

from engine.kernels.gemm.widen import BLOCK, codes_per_word, values_of
from engine.kernels.target import tl, triton


def block_k_of(kind: int, group: int, size: int) -> int:
    """Columns read at a time, of values of x of `size` bytes: 64 where a group has fewer than 128."""
    return BLOCK if size > 2 or (group % (2 * BLOCK) and scales_sums(kind, group, BLOCK)) else 2 * BLOCK


def scales_sums(kind: int, group: int, block_k: int) -> bool:
    """Whether scales multiply sums: the constant ON_SUMS."""
    return group % block_k == 0 or (block_k == BLOCK and BLOCK % group == 0 and group * codes_per_word(kind) >= BLOCK)


@triton.jit
def group_values(
    values, columns, at, zeros, scales, n, n_in, depth, groups, GROUP: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, ON_SUMS: tl.constexpr,
):  # fmt: skip
    """values [n, columns] less their zeros, scaled where scales multiply values; `at`: their group, where it is one."""
    if ZEROS or (SCALES and not ON_SUMS):
        line = n.to(tl.int64) * groups
        if ON_SUMS:
            place, mask = (line + at)[:, None], n_in[:, None]
        else:
            place, mask = line[:, None] + (columns // GROUP)[None, :], n_in[:, None] & (columns < depth)[None, :]
        if ZEROS:
            values -= tl.load(zeros + place, mask=mask, other=0).to(values.dtype)
        if SCALES and not ON_SUMS:
            scale = tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
            values = (values.to(tl.float32) * scale).to(values.dtype)
    return values


@triton.jit
def code_sums(
    n, n_in, m, m_in, x, words, scales, zeros, start, end, depth, line, groups, x_stride, KIND: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ON_SUMS: tl.constexpr, PAIRS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns start .. end of rows n of the words times rows m of x: float32 [BLOCK_N, BLOCK_M].

    PAIRS: x is bfloat16, and units make two values of two words at a time. EVEN: `depth` is a multiple of BLOCK_K.
    """
    PER: tl.constexpr = 4 if KIND < 2 else 2  # codes of a word
    APART: tl.constexpr = 64 // PER  # columns between them
    # Codes of a word that share a scale.
    RUN: tl.constexpr = PER if GROUP % BLOCK_K == 0 else GROUP // APART if GROUP >= APART else 1
    dtype: tl.constexpr = x.dtype.element_ty
    word_line = words + n.to(tl.int64)[:, None] * line
    x_line = x + m.to(tl.int64)[None, :] * x_stride
    j = tl.arange(0, BLOCK_K // PER)
    offset = j // APART * 64 + j % APART
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(start, end, BLOCK_K):
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
            at = first // GROUP
            if GROUP % BLOCK_K != 0:
                at = tl.minimum(at + place // RUN, groups - 1)
            values = group_values(values_of(tile, dtype, KIND, place, PAIRS), columns, at, zeros, scales, n, n_in,
                                  depth, groups, GROUP, SCALES, ZEROS, ON_SUMS)  # fmt: skip
            if not (SCALES and ON_SUMS):
                sums = tl.dot(values, tokens, sums, input_precision="ieee")
            else:
                if place % RUN == 0:
                    product = tl.dot(values, tokens, input_precision="ieee")
                else:
                    product = tl.dot(values, tokens, product, input_precision="ieee")
                if place % RUN == RUN - 1:
                    scale = tl.load(scales + n.to(tl.int64) * groups + at, mask=n_in, other=0.0)
                    sums += product * scale.to(tl.float32)[:, None]
    return sums


@triton.jit
def integer_sums(
    n, n_in, m, m_in, x, codes, start, end, depth, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns start .. end of rows n of int8 codes times rows m of int8 x: int32 [BLOCK_N, BLOCK_M], exact."""
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
