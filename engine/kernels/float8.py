"""float8: codes of a KV cache to numbers and back inside a kernel; any target, whether or not its units know FP8.

    e4m3   sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, 0x7f is not a number; at most 448
    e5m2   sign, 5 bits of exponent (bias 15), 2 of mantissa: the upper half of a float16; at most 57,344

Rounding is to nearest even, in integers, so all targets and the C kernels (_fast/c/cpu/float8.h) make the same codes. A
number beyond the largest becomes the largest, and what is not finite becomes 0x7f. NVIDIA's units make bfloat16 of four
codes of e4m3 by 12 integer operations (E4M3_FOURS), because conversions run at a fraction of the rate; to other numbers
e4m3 is widened by units that know it (Target.widens_fp8), and elsewhere by integers too. Users: rotate.py,
attention/attend.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import Target, tl, triton

FLOATS, E4M3, E5M2, E4M3_UNITS, E4M3_FOURS = range(5)  # the constant CODES of kernels


def codes_of(cache: Tensor, device: Target, dtype: torch.dtype) -> int:
    """CODES of a cache of this dtype on this target, in kernels whose numbers are `dtype`."""
    if cache.dtype is torch.float8_e5m2:
        return E5M2
    if cache.dtype is not torch.float8_e4m3fn:
        return FLOATS
    if device.runs_ptx and dtype is torch.bfloat16:
        return E4M3_FOURS
    return E4M3_UNITS if device.widens_fp8 else E4M3


def as_bytes(cache: Tensor) -> Tensor:
    """What a kernel is given: codes as uint8, which every target can load."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


# Four bfloat16 ($0, $1) of four codes ($2). A code goes to the upper byte of 16 bits, its sign also to the byte above
# (8 in a selector of prmt repeats a byte's highest bit), and all of it down by 4: the sign stays, exponent and mantissa
# come to the last bits of bfloat16's exponent and the first of its mantissa. That is off by 2^120, which fma puts
# right, exactly. 1 added to seven bits carries into the eighth where all are set: such a code, 0x7f, gets all bits.
FOURS = tl.constexpr(
    "{ .reg .b32 a, m, odd, factor, zero; mov.b32 factor, 0x7b807b80; mov.b32 zero, 0x80008000;"
    " and.b32 odd, $2, 0x7f7f7f7f; add.u32 odd, odd, 0x01010101;"
    " prmt.b32 a, $2, 0, 0x1804; shr.s32 a, a, 4; prmt.b32 m, odd, 0, 0x9988;"
    " lop3.b32 a, a, 0x87f087f0, m, 0xea; fma.rn.bf16x2 $0, a, factor, zero;"
    " prmt.b32 a, $2, 0, 0x3a24; shr.s32 a, a, 4; prmt.b32 m, odd, 0, 0xbbaa;"
    " lop3.b32 a, a, 0x87f087f0, m, 0xea; fma.rn.bf16x2 $1, a, factor, zero; }"
)


@triton.jit
def widen8(codes, dtype, CODES: tl.constexpr):
    """uint8 codes, any shape -> their values in `dtype` (bfloat16 where CODES is E4M3_FOURS), exact."""
    if CODES == 4:
        values = tl.inline_asm_elementwise(FOURS, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif CODES == 3:
        values = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif CODES == 2:
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:  # into the exponent and mantissa of float16, and 2^8
        bits = codes.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16)
        values = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values).to(dtype)
    return values


@triton.jit
def narrow8(values, CODES: tl.constexpr):
    """float32 values, any shape -> uint8 codes."""
    mantissa: tl.constexpr = 2 if CODES == 2 else 3
    bias: tl.constexpr = 15 if CODES == 2 else 7
    most: tl.constexpr = 57344.0 if CODES == 2 else 448.0
    least: tl.constexpr = 6.103515625e-05 if CODES == 2 else 0.015625  # of those with an exponent: 2^-14, 2^-6
    # Added to smaller numbers: its last bit is the step between their codes. 2^7 and 2^14, and their bits.
    step: tl.constexpr = 128.0 if CODES == 2 else 16384.0
    step_bits: tl.constexpr = 0x43000000 if CODES == 2 else 0x46800000
    shift: tl.constexpr = 23 - mantissa
    size = tl.abs(values)
    held = tl.minimum(size, most)
    bits = held.to(tl.int32, bitcast=True)
    above = ((bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift) - ((127 - bias) << mantissa)
    below = (held + step).to(tl.int32, bitcast=True) - step_bits
    code = tl.where(held < least, below, above)
    code = tl.where(size < float("inf"), code, 0x7F)
    return (code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
