"""float8: conversion of KV-cache codes to numbers and back inside a kernel, on any target, with or without FP8 units.

    e4m3   sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, 0x7f is not a number; at most 448
    e5m2   sign, 5 bits of exponent (bias 15), 2 of mantissa: the upper half of a float16; at most 57,344

Rounding is to nearest even, in integer arithmetic, so all targets and the C kernels (_fast/c/cpu/float8.h) make the
same codes. Numbers beyond the largest code saturate, and numbers that are not finite become 0x7f. Every code is exact
in float16, and a further conversion to bfloat16 would cost more than everything else, so attention multiplies codes as
float16. e4m3 is widened by hardware if available (Target.widens_fp8: two codes per instruction), else by integer
arithmetic; e5m2 by moving bytes. Users: rotate.py, attention/.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import Target, tl, triton

FLOATS, E4M3, E5M2, E4M3_UNITS, E5M2_BYTES = range(5)  # the constant CODES of kernels


def codes_of(cache: Tensor, device: Target) -> int:
    """The constant CODES for a cache on this target."""
    if cache.dtype is torch.float8_e5m2:
        return E5M2_BYTES if device.runs_ptx else E5M2
    if cache.dtype is not torch.float8_e4m3fn:
        return FLOATS
    return E4M3_UNITS if device.widens_fp8 else E4M3


def as_bytes(cache: Tensor) -> Tensor:
    """The cache as a kernel argument: codes as uint8, which every target can load."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def as_pairs(cache: Tensor) -> Tensor:
    """Codes as int16 words of two; other dtypes unchanged."""
    return cache.view(torch.uint8).view(torch.int16) if cache.dtype.itemsize == 1 else cache


# Two words ($2) of two codes each -> float16 of both words' lower codes ($0), and of their upper codes ($1).
UNITS = tl.constexpr(
    "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {low, high}, sorted;"
    " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
BYTES = tl.constexpr("{ prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00; }")
# Four consecutive codes of e5m2 ($2) -> float16 of the first two ($0) and of the last two ($1).
IN_ORDER = tl.constexpr("{ prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424; }")


@triton.jit
def widen8(codes, dtype, CODES: tl.constexpr):
    """uint8 codes, any shape -> their values in `dtype`, exact."""
    if CODES == 3:
        values = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif CODES == 4:
        values = tl.inline_asm_elementwise(IN_ORDER, "=&r,=r,r", [codes], tl.float16, True, 4).to(dtype)
    elif CODES == 2:
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:  # into the exponent and mantissa of float16, and 2^8
        bits = codes.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16)
        values = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values).to(dtype)
    return values


@triton.jit
def widen_pairs(words, dtype, CODES: tl.constexpr):
    """int16 words of two codes, any shape -> exact values in `dtype` of the lower codes and of the upper codes."""
    if CODES >= 3:
        text: tl.constexpr = UNITS if CODES == 3 else BYTES
        low, high = tl.inline_asm_elementwise(text, "=&r,=r,r", [words], (tl.float16, tl.float16), True, 2)
        low, high = low.to(dtype), high.to(dtype)
    else:
        bits = words.to(tl.uint16, bitcast=True)
        low, high = widen8(bits & 0xFF, dtype, CODES), widen8(bits >> 8, dtype, CODES)
    return low, high


@triton.jit
def narrow8(values, CODES: tl.constexpr):
    """float32 values, any shape -> uint8 codes."""
    mantissa: tl.constexpr = 2 if CODES == 2 or CODES == 4 else 3
    bias: tl.constexpr = 15 if mantissa == 2 else 7
    most: tl.constexpr = 57344.0 if mantissa == 2 else 448.0
    least: tl.constexpr = 6.103515625e-05 if mantissa == 2 else 0.015625  # least normal number: 2^-14, 2^-6
    # Adding `step` (2^7 or 2^14) to smaller numbers rounds them: its last bit is the distance between their codes.
    step: tl.constexpr = 128.0 if mantissa == 2 else 16384.0
    step_bits: tl.constexpr = 0x43000000 if mantissa == 2 else 0x46800000
    shift: tl.constexpr = 23 - mantissa
    size = tl.abs(values)
    held = tl.minimum(size, most)
    bits = held.to(tl.int32, bitcast=True)
    above = ((bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift) - ((127 - bias) << mantissa)
    below = (held + step).to(tl.int32, bitcast=True) - step_bits
    code = tl.where(held < least, below, above)
    code = tl.where(size < float("inf"), code, 0x7F)
    return (code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
