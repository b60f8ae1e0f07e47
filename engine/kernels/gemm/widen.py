"""widen: conversion of codes to numbers inside a kernel, shared by all products that read words of codes.

In: a tile of words. Out: the value of one code of each word, before zeros and scales; exact, except that NF4 values are
rounded to x's dtype. Users: gemm/code_sums. A word has 16 bits: four 4-bit codes or two 8-bit codes. Its codes belong
to columns of a block of 64 that are 16 or 32 apart, the first column in the lowest bits, so that neighbouring words
belong to neighbouring columns of x and no value changes lanes. If x is bfloat16, NVIDIA's units make two values from
two words in a few 32-bit operations, because conversion instructions run at half the rate, and a product of few rows
has time for about ten operations per 8-bit code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.gemm.codes import NORMAL
from engine.kernels.target import tl, triton

BLOCK = 64  # columns that share a run of words
INT4, E2M1, NF4, INT8, E4M3 = range(5)  # the constant KIND of kernels
TABLE = tl.constexpr(NORMAL)  # the values of NF4


@triton.jit
def widened(codes, KIND: tl.constexpr):
    """Values of codes of any shape, uint8 (int8 for INT8) -> float32."""
    if KIND == 0:
        values = (codes.to(tl.int32) - 8).to(tl.float32)
    elif KIND == 1:  # twice the magnitude is an integer: 0 1 2 3 4 6 8 12
        magnitude = (codes & 7).to(tl.int32)
        shift = tl.maximum((magnitude >> 1) - 1, 0)
        twice = tl.where(magnitude < 2, magnitude, (2 | (magnitude & 1)) << shift)
        values = tl.where(codes.to(tl.int32) > 7, -twice, twice).to(tl.float32) * 0.5
    elif KIND == 2:
        values = tl.zeros(codes.shape, tl.float32)
        for code in tl.static_range(16):
            values = tl.where(codes == code, TABLE[code], values)
    elif KIND == 3:
        values = codes.to(tl.float32)
    else:  # e4m3's bits as a float16, times 2^8; needs no FP8 units
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        values = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return values


def _program(settings: str, steps: str, last: str) -> Any:
    """PTX that makes two bfloat16 (register $0) from two words ($1)."""
    return tl.constexpr("{ .reg .b32 a, s, factor, off, number; " + settings + steps + last + " }")


# The code's bits are moved to their place in a 16-bit lane. The lane as bfloat16 then differs from the value by a power
# of two (e4m3 2^120, e2m1 2^126) or by a constant (integers: 0x4300 | code is 128 + code), which one fma corrects
# exactly. If only a factor is needed, the fma adds -0.
FMA = "fma.rn.bf16x2 $0, a, factor, off;"
OF_INT4 = "mov.b32 factor, 0x3f803f80; mov.b32 off, 0xc308c308;"  # 1, -136
OF_E2M1 = "mov.b32 factor, 0x7e807e80; mov.b32 off, 0x80008000;"
OF_E4M3 = "mov.b32 factor, 0x7b807b80; mov.b32 off, 0x80008000;"
OF_INT8 = "mov.b32 factor, 0xbf80bf80;"  # -1
FOUR = "mov.b32 number, 0x43004300; lop3.b32 a, a, 0x000f000f, number, 0xea;"  # (a & b) | c
PLACED = "lop3.b32 a, a, 0x80008000, s, 0xea;"  # (a & the signs' bits) | s
SMALL = "and.b32 s, s, 0x01c001c0;" + PLACED
EIGHT = "and.b32 s, s, 0x07f007f0;" + PLACED
# (128 + the low seven bits) - 128, or - 256 if the highest bit is set
LESS = "mov.b32 number, 0x43004300; lop3.b32 s, a, 0x00800080, number, 0xea; lop3.b32 a, a, 0x007f007f, number, 0xea;"
INT4_0 = _program(OF_INT4, "mov.b32 a, $1;" + FOUR, FMA)
INT4_1 = _program(OF_INT4, "shr.u32 a, $1, 4;" + FOUR, FMA)
INT4_2 = _program(OF_INT4, "shr.u32 a, $1, 8;" + FOUR, FMA)
INT4_3 = _program(OF_INT4, "shr.u32 a, $1, 12;" + FOUR, FMA)
# With a zero point the constant is -136 - zero, from register $2.
ONE = "mov.b32 factor, 0x3f803f80;"
LESS_ZERO = "fma.rn.bf16x2 $0, a, factor, $2;"
INT4_0_LESS = _program(ONE, "mov.b32 a, $1;" + FOUR, LESS_ZERO)
INT4_1_LESS = _program(ONE, "shr.u32 a, $1, 4;" + FOUR, LESS_ZERO)
INT4_2_LESS = _program(ONE, "shr.u32 a, $1, 8;" + FOUR, LESS_ZERO)
INT4_3_LESS = _program(ONE, "shr.u32 a, $1, 12;" + FOUR, LESS_ZERO)
E2M1_0 = _program(OF_E2M1, "shl.b32 a, $1, 12; shl.b32 s, $1, 6;" + SMALL, FMA)
E2M1_1 = _program(OF_E2M1, "shl.b32 a, $1, 8; shl.b32 s, $1, 2;" + SMALL, FMA)
E2M1_2 = _program(OF_E2M1, "shl.b32 a, $1, 4; shr.u32 s, $1, 2;" + SMALL, FMA)
E2M1_3 = _program(OF_E2M1, "mov.b32 a, $1; shr.u32 s, $1, 6;" + SMALL, FMA)
INT8_0 = _program(OF_INT8, "mov.b32 a, $1;" + LESS, "fma.rn.bf16x2 $0, s, factor, a;")
INT8_1 = _program(OF_INT8, "shr.u32 a, $1, 8;" + LESS, "fma.rn.bf16x2 $0, s, factor, a;")
E4M3_0 = _program(OF_E4M3, "shl.b32 a, $1, 8; shl.b32 s, $1, 4;" + EIGHT, FMA)
E4M3_1 = _program(OF_E4M3, "mov.b32 a, $1; shr.u32 s, $1, 4;" + EIGHT, FMA)


def _table_bytes(first: int, high: int) -> str:
    """The high or the low bytes of eight NF4 values in bfloat16, as the two words from which prmt selects."""
    bits = torch.tensor(NORMAL[first : first + 8]).to(torch.bfloat16).view(torch.int16).tolist()
    each = [(number >> 8 * high) & 0xFF for number in bits]
    return ", ".join(f"0x{int.from_bytes(each[at : at + 4], 'little'):08x}" for at in (0, 4))


# NF4: the low three bits of both codes select bytes among eight values, the highest bit selects one of two tables.
BOTH = "and.b32 c, c, 0x000f000f; shr.u32 s, c, 12; lop3.b32 s, s, c, 0x77, 0xa8;"  # (s | c) & 0x77
CHOSEN = "prmt.b32 low, {}, s; prmt.b32 high, {}, s; prmt.b32 {}, low, high, 0x5140;"
OF_EIGHT = "".join(
    CHOSEN.format(_table_bytes(first, 0), _table_bytes(first, 1), name) for first, name in ((0, "a"), (8, "b"))
)
EITHER = "shl.b32 c, c, 4; prmt.b32 c, c, 0, 0xaa88; lop3.b32 $0, c, b, a, 0xca;"  # the top bit in all bits; c ? b : a
NF4_0, NF4_1, NF4_2, NF4_3 = (
    tl.constexpr(f"{{ .reg .b32 a, b, c, s, low, high; shr.u32 c, $1, {shift}; {BOTH}{OF_EIGHT}{EITHER} }}")
    for shift in (0, 4, 8, 12)
)


@triton.jit
def of_pairs(words, PROGRAM: tl.constexpr):
    return tl.inline_asm_elementwise(PROGRAM, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def values_of(words, dtype: tl.constexpr, KIND: tl.constexpr, PLACE: tl.constexpr, PAIRS: tl.constexpr):
    """int16 words, any shape -> the values of code number PLACE in `dtype`; PAIRS: two at a time, in bfloat16."""
    if PAIRS:
        if KIND == 0:
            values = of_pairs(words, (INT4_0, INT4_1, INT4_2, INT4_3)[PLACE])
        elif KIND == 1:
            values = of_pairs(words, (E2M1_0, E2M1_1, E2M1_2, E2M1_3)[PLACE])
        elif KIND == 2:
            values = of_pairs(words, (NF4_0, NF4_1, NF4_2, NF4_3)[PLACE])
        elif KIND == 3:
            values = of_pairs(words, (INT8_0, INT8_1)[PLACE])
        else:
            values = of_pairs(words, (E4M3_0, E4M3_1)[PLACE])
    else:
        bits: tl.constexpr = 4 if KIND < 3 else 8
        codes = ((words.to(tl.int32) >> (PLACE * bits)) & ((1 << bits) - 1)).to(tl.uint8)
        if KIND == 3:
            values = widened(codes.to(tl.int8, bitcast=True), KIND).to(dtype)
        else:
            values = widened(codes, KIND).to(dtype)
    return values


@triton.jit
def minus_zero(zero):
    """-136 - zero as bfloat16, for zeros int8 -8 .. 7 of INT4: the bits of -128 - n are 0xc300 + n."""
    return ((zero.to(tl.int32) & 15) ^ 0xC308).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def less(values, zero, PAIRS: tl.constexpr):
    """values - zero: integer zeros exactly, in values' dtype, other zeros in float32; PAIRS: as in `values_of`."""
    if zero.dtype != tl.int8:
        values = (values.to(tl.float32) - zero).to(values.dtype)
    elif PAIRS:
        values, zero = tl.broadcast(values, zero.to(values.dtype))
        values = tl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, zero], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        values -= zero.to(values.dtype)
    return values


@triton.jit
def values_less(words, zero, dtype: tl.constexpr, KIND: tl.constexpr, PLACE: tl.constexpr, PAIRS: tl.constexpr):
    """`values_of` minus zero, int8 or float32, which broadcasts to words; with PAIRS, int8 zeros of INT4 take no
    instruction per value."""
    if PAIRS and KIND == 0 and zero.dtype == tl.int8:
        both, offset = tl.broadcast(words, minus_zero(zero))
        values = tl.inline_asm_elementwise(
            (INT4_0_LESS, INT4_1_LESS, INT4_2_LESS, INT4_3_LESS)[PLACE], "=r,r,r", [both, offset],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = less(values_of(words, dtype, KIND, PLACE, PAIRS), zero, PAIRS)
    return values


def codes_per_word(kind: int) -> int:
    """The number of codes of this kind in a 16-bit word."""
    return 4 if kind < INT8 else 2


def words_of(codes: Tensor, count: int) -> Tensor:
    """Codes [N, K], uint8 or int8, `count` in a word -> int16 [N, ceil(K / 64) * 64 / count]."""
    blocks = pad(codes.view(torch.uint8), (0, -codes.shape[1] % BLOCK)).unflatten(1, (-1, count, BLOCK // count))
    shifts = torch.arange(count, device=codes.device, dtype=torch.int32)[:, None] * (16 // count)
    return (blocks.int() << shifts).sum(2, dtype=torch.int32).to(torch.int16).flatten(1)


def codes_in(words: Tensor, count: int, columns: int) -> Tensor:
    """The inverse of `words_of`: uint8 [N, columns]."""
    bits = 16 // count
    shifts = torch.arange(count, device=words.device, dtype=torch.int32)[:, None] * bits
    runs = words.int().unflatten(1, (-1, 1, BLOCK // count))
    return ((runs >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)[:, :columns]
