"""Random numbers for draws on the device: a stateless function of (seed, place in the answer, number).

    word = Philox4x32-10(key = seed, counter = (number, place, stream))   stream = TOKEN or GROUP, plus 2 per draw; XTC
    v = (word + 1/2) / 2^32;  noise = -log2(-ln(1 - v))

Each number has the largest `log2(weight) + noise` with a probability proportional to its weight (Gumbel-max).
-ln(1 - v) is computed as a series if v is small: winners have small v, and 1 - v would drop the bits in which they
differ. Philox: Salmon et al. 2011. Users: pick, cut and xtc.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.kernels.target import tl, triton

TOKEN_STREAM, GROUP_STREAM = 0, 1  # separate streams for tokens and groups; draw n (from 0) adds 2 n
MASK = 0xFFFF_FFFF
FACTORS = np.array(((0xD2511F53,), (0xCD9E8D57,)), np.uint64)
NEAREST_TO_ONE = 1 - 2.0**-24  # the largest float32 below 1


@triton.jit
def fraction(seed, place, number, stream):
    """Return v, float32 in number's shape, above 0 and below 1; seed int64, place and stream int32 are scalars, number
    is int32."""
    zero = number * 0
    word, _, _, _ = tl.philox(seed, number, zero + place, zero + stream, zero)
    return tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)


@triton.jit
def noise(seed, place, number, stream):
    """Return float32 in number's shape; arguments as for `fraction`."""
    v = fraction(seed, place, number, stream)
    small = v * (1.0 + v * (0.5 + v * 0.33333334))
    exponential = tl.where(v < 0.015625, small, tl.log2(1.0 - v) * -0.6931471805599453)
    return -tl.log2(exponential)


def fraction_reference(seed: int, place: int | np.ndarray, number: Tensor, stream: int) -> Tensor:
    """Specification: number int64 [n], a place or places int64 [n] -> float32 [n]."""
    return (philox(seed, place, number, stream).float() * 2.0**-32 + 2.0**-33).clamp(max=NEAREST_TO_ONE)


def noise_reference(seed: int, place: int | np.ndarray, number: Tensor, stream: int) -> Tensor:
    """Specification: as of `fraction_reference`."""
    v = fraction_reference(seed, place, number, stream)
    small = v * (1.0 + v * (0.5 + v * (1 / 3)))
    return -torch.log2(torch.where(v < 2.0**-6, small, -torch.log(1.0 - v)))


def philox(seed: int, place: int | np.ndarray, number: Tensor, stream: int, rounds: int = 10) -> Tensor:
    """Return the first word of Philox4x32 for the counters (number, place, stream, 0): int64 [n] in [0, 2^32)."""
    words: np.ndarray = np.zeros((2, 2, len(number)), np.uint64)
    even, odd = words  # words 0 and 2, words 1 and 3
    even[0], odd[0], even[1] = number.cpu().numpy().view(np.uint64) & MASK, place & MASK, stream
    low, high = seed & MASK, seed >> 32 & MASK
    for _ in range(rounds):
        products = (even * FACTORS)[::-1]  # of numbers below 2^32: all 64 bits are right
        even = products >> 32 ^ odd ^ np.array(((low,), (high,)), np.uint64)
        odd = products & MASK
        low, high = low + 0x9E3779B9 & MASK, high + 0xBB67AE85 & MASK
    return torch.from_numpy(even[0].view(np.int64)).to(number.device)
