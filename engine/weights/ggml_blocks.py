"""Blocks of GGUF's quantised matrices to codes: bytes [N, blocks * size] -> Codes, nothing requantised.

    q4_0   32 columns: float16 d, 16 bytes, low nibbles first                       w = d (q - 8)
    q8_0   32 columns: float16 d, 32 int8                                           w = d q
    q4_k   256 columns: float16 d and dmin, 12 bytes of 8 six-bit scales and mins, 128 bytes; groups of 32
                                                                                    w = d scale q - dmin min
    q6_k   256 columns: 128 low nibbles, 64 bytes of high pairs, 16 int8 scales, float16 d; groups of 16
                                                                                    w = d scale (q - 32)
A q4_k group's offset becomes a float32 zero, (dmin min) / (d scale); where the scale is 0, the codes say nothing, and
others give the offset. Thread: any. Users: engine/quant/gguf, the embeddings of weights/gguf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.gemm.codes import Codes, Kind


def codes_of(kind: str, lines: Tensor) -> Codes:
    """A matrix: its rows' bytes, uint8 [N, blocks * size]."""
    size, read = BLOCKS[kind][1:]
    return read(lines.unflatten(1, (-1, size)))


def line_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of so many columns."""
    block, size, _ = BLOCKS[kind]
    if columns % block:
        raise ConfigError(f"a matrix of {columns} columns in {kind}, whose blocks have {block}: the file is damaged")
    return columns // block * size


def _half(raw: Tensor) -> Tensor:
    """Bytes [..., 2] -> float32 [...]."""
    numbers = raw.contiguous().view(torch.float16).squeeze(-1).float()
    if not bool(numbers.isfinite().all()):
        raise ConfigError("scales of GGUF blocks are NaN or infinite; fetch the file again")
    return numbers


def _q4_0(blocks: Tensor) -> Codes:
    both = blocks[:, :, 2:]
    values = torch.cat([both & 15, both >> 4], dim=2).flatten(1)
    return Codes(Kind.INT4, values, _half(blocks[:, :, :2]), 32)


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(Kind.INT8, blocks[:, :, 2:].flatten(1).view(torch.int8), _half(blocks[:, :, :2]), 32)


def _q4_k(blocks: Tensor) -> Codes:
    packed = blocks[:, :, 4:16]
    low, middle, high = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    six = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=2).float()
    least = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=2).float()
    scale = (_half(blocks[:, :, :2])[..., None] * six).flatten(1)
    offset = (_half(blocks[:, :, 2:4])[..., None] * least).flatten(1)
    both = blocks[:, :, 16:].unflatten(2, (4, 32))  # each 32 bytes hold two groups
    values = torch.stack([both & 15, both >> 4], dim=3).flatten(1)
    constant = scale == 0
    values = torch.where(constant.repeat_interleave(32, 1), 0, values).to(torch.uint8)
    zero = torch.where(constant, 1.0, offset / torch.where(constant, 1.0, scale))
    return Codes(Kind.INT4, values, torch.where(constant, offset, scale), 32, zero=zero - 8)


def _q6_k(blocks: Tensor) -> Codes:
    low, high = blocks[:, :, :128].unflatten(2, (2, 2, 32)), blocks[:, :, 128:192].unflatten(2, (2, 32))
    nibbles = torch.stack([low[:, :, :, 0] & 15, low[:, :, :, 1] & 15, low[:, :, :, 0] >> 4, low[:, :, :, 1] >> 4], 3)
    pairs = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    values = ((nibbles | pairs << 4).to(torch.int8) - 32).flatten(1)
    scale = _half(blocks[:, :, 208:])[..., None] * blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    return Codes(Kind.INT8, values, scale.flatten(1), 16)


# Kind -> columns of a block, its bytes, its reader.
BLOCKS: dict[str, tuple[int, int, Callable[[Tensor], Codes]]] = {
    "q4_0": (32, 18, _q4_0),
    "q8_0": (32, 34, _q8_0),
    "q4_k": (256, 144, _q4_k),
    "q6_k": (256, 210, _q6_k),
}
