"""widen: codes of a quantised matrix to numbers inside a kernel, the same for every product that reads them.

In: a tile of codes. Out: their values as float32, exact, before zeros and scales. Users: gemm/groups. Four-bit codes
lie two in a byte, in blocks of 64 columns: byte j has column j below and column j + 32 above; no value changes lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.target import tl, triton

HALF = 32  # columns between the two codes of a byte
INT4, E2M1, INT8, E4M3 = range(4)  # the constant KIND of kernels


@triton.jit
def widened(codes, KIND: tl.constexpr):
    """Values of codes, any shape: uint8, of INT8 int8 -> float32."""
    if KIND == 0:
        values = (codes.to(tl.int32) - 8).to(tl.float32)
    elif KIND == 1:  # twice the magnitude is an integer: 0 1 2 3 4 6 8 12
        magnitude = (codes & 7).to(tl.int32)
        shift = tl.maximum((magnitude >> 1) - 1, 0)
        twice = tl.where(magnitude < 2, magnitude, (2 | (magnitude & 1)) << shift)
        values = tl.where(codes.to(tl.int32) > 7, -twice, twice).to(tl.float32) * 0.5
    elif KIND == 2:
        values = codes.to(tl.float32)
    else:  # sign, exponent and mantissa into those of float16, and 2^8: no unit for FP8 is needed
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        values = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return values


def halves(codes: Tensor) -> Tensor:
    """Four-bit codes [N, K] uint8 -> bytes [N, ceil(K / 64) * 32]."""
    blocks = pad(codes, (0, -codes.shape[1] % (2 * HALF))).unflatten(1, (-1, 2, HALF))
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1)


def from_halves(packed: Tensor, columns: int) -> Tensor:
    """What `halves` did undone: codes [N, columns]."""
    blocks = packed.unflatten(1, (-1, HALF))
    return torch.stack([blocks & 15, blocks >> 4], dim=2).flatten(1)[:, :columns]
