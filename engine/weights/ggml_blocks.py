"""Converts GGUF's quantised blocks to codes without requantisation: bytes [N, blocks * size] -> Codes.

    q4_0   32 columns: float16 d, 16 bytes, low nibbles first                       w = d (q - 8)
    q4_1   the same, after float16 d and m                                          w = d q + m
    q5_0   32 columns: float16 d, 32 high bits, 16 bytes                            w = d (q - 16)
    q5_1   the same, after float16 d and m                                          w = d q + m
    q8_0   32 columns: float16 d, 32 int8                                           w = d q
    q4_k   256 columns: float16 d and dmin, 12 bytes of 8 six-bit scales and mins, 128 bytes; groups of 32
                                                                                    w = d scale q - dmin min
    q5_k   the same, with 32 bytes of high bits before the low bits
    q6_k   256 columns: 128 low nibbles, 64 bytes of high pairs, 16 int8 scales, float16 d; groups of 16
                                                                                    w = d scale (q - 32)
    iq4_nl 32 columns: float16 d, 16 bytes of places in a table                     w = d table[q]
    iq4_xs 256 columns: float16 d, 2 bytes of high pairs, 4 of low nibbles of 8 scales, 128 bytes of places
                                                                                    w = d (scale - 32) table[q]
5-bit codes and table values take a byte in memory. A group's offset becomes a float32 zero point, in q4_k
(dmin min) / (d scale). If the scale is 0, the codes are replaced so that they give the offset. Thread: any.
Users: engine/quant/gguf, the embeddings of weights/gguf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes, Kind

# https://github.com/ggml-org/llama.cpp, kvalues_iq4nl in ggml/src/ggml-common.h.
PLACES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def codes_of(kind: str, lines: Tensor) -> Codes:
    """The Codes of a matrix; lines: the bytes of its rows, uint8 [N, blocks * size]."""
    size, _, read = BLOCKS[kind][1:]
    return read(lines.unflatten(1, (-1, size)))


def line_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of `columns` columns in the file."""
    block, size, _, _ = BLOCKS[kind]
    if columns % block:
        raise ConfigError(f"a matrix of {columns} columns in {kind}, whose blocks have {block}: the file is damaged")
    return columns // block * size


def bytes_in_memory(kind: str, columns: int) -> int:
    """Bytes of a row in memory: codes of 4 or 8 bits, scales (of q4_0, q4_1 float16) and zero points."""
    return columns // BLOCKS[kind][0] * BLOCKS[kind][2]


def _half(raw: Tensor) -> Tensor:
    """Bytes [..., 2] -> float32 [...]."""
    numbers = raw.contiguous().view(torch.float16).squeeze(-1).float()
    if not bool(numbers.isfinite().all()):
        raise ConfigError("scales of GGUF blocks are NaN or infinite; fetch the file again")
    return numbers


def _halves(both: Tensor) -> Tensor:
    """Bytes [..., n] -> the low nibbles, then the high nibbles."""
    return torch.cat([both & 15, both >> 4], dim=-1)


def _less(kind: Kind, values: Tensor, scale: Tensor, offset: Tensor) -> Codes:
    """w = scale * values - offset, groups of 32."""
    middle = 8 if kind is Kind.INT4 else 0  # the code that means zero
    constant = scale == 0
    values = torch.where(constant.repeat_interleave(32, 1), 0, values)
    zero = torch.where(constant, 1.0, offset / torch.where(constant, 1.0, scale)) - middle
    values = values.to(torch.uint8 if kind is Kind.INT4 else torch.int8)
    return Codes(kind, values, torch.where(constant, offset, scale), 32, zero=zero)


def _high(blocks: Tensor) -> Tensor:
    """Four bytes [N, blocks, 4] -> the fifth bit of 32 codes."""
    bits = blocks[..., None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    return bits.flatten(2) << 4


def _q4_0(blocks: Tensor) -> Codes:
    return Codes(Kind.INT4, _halves(blocks[:, :, 2:]).flatten(1), _half(blocks[:, :, :2]), 32)


def _q4_1(blocks: Tensor) -> Codes:
    values = _halves(blocks[:, :, 4:]).flatten(1)
    return _less(Kind.INT4, values, _half(blocks[:, :, :2]), -_half(blocks[:, :, 2:4]))


def _q5_0(blocks: Tensor) -> Codes:
    values = (_halves(blocks[:, :, 6:]) | _high(blocks[:, :, 2:6])).to(torch.int8) - 16
    return Codes(Kind.INT8, values.flatten(1), _half(blocks[:, :, :2]), 32)


def _q5_1(blocks: Tensor) -> Codes:
    values = (_halves(blocks[:, :, 8:]) | _high(blocks[:, :, 4:8])).flatten(1)
    return _less(Kind.INT8, values, _half(blocks[:, :, :2]), -_half(blocks[:, :, 2:4]))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(Kind.INT8, blocks[:, :, 2:].flatten(1).view(torch.int8), _half(blocks[:, :, :2]), 32)


def _of_groups(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of the 8 groups of a q4_k or q5_k block, [N, groups]."""
    packed = blocks[:, :, 4:16]
    low, middle, high = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    six = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=2).float()
    least = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=2).float()
    scale = (_half(blocks[:, :, :2])[..., None] * six).flatten(1)
    return scale, (_half(blocks[:, :, 2:4])[..., None] * least).flatten(1)


def _q4_k(blocks: Tensor) -> Codes:
    values = _halves(blocks[:, :, 16:].unflatten(2, (4, 32))).flatten(1)  # each 32 bytes hold two groups
    return _less(Kind.INT4, values, *_of_groups(blocks))


def _q5_k(blocks: Tensor) -> Codes:
    low = _halves(blocks[:, :, 48:].unflatten(2, (4, 32))).flatten(2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]  # bit g of byte k: group g, column k
    high = (blocks[:, :, None, 16:48] >> shifts & 1).flatten(2)
    return _less(Kind.INT8, (low | high << 4).flatten(1), *_of_groups(blocks))


def _q6_k(blocks: Tensor) -> Codes:
    low, high = blocks[:, :, :128].unflatten(2, (2, 2, 32)), blocks[:, :, 128:192].unflatten(2, (2, 32))
    nibbles = torch.stack([low[:, :, :, 0] & 15, low[:, :, :, 1] & 15, low[:, :, :, 0] >> 4, low[:, :, :, 1] >> 4], 3)
    pairs = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    values = ((nibbles | pairs << 4).to(torch.int8) - 32).flatten(1)
    scale = _half(blocks[:, :, 208:])[..., None] * blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    return Codes(Kind.INT8, values, scale.flatten(1), 16)


def _at_places(both: Tensor) -> Tensor:
    """Nibbles [..., 16] -> table values, int8."""
    return torch.tensor(PLACES, dtype=torch.int8, device=both.device)[_halves(both).long()].flatten(1)


def _iq4_nl(blocks: Tensor) -> Codes:
    return Codes(Kind.INT8, _at_places(blocks[:, :, 2:]), _half(blocks[:, :, :2]), 32)


def _iq4_xs(blocks: Tensor) -> Codes:
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, :, 2:4, None] >> pairs & 3).flatten(2)
    low = torch.stack([blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4], dim=3).flatten(2)
    scale = _half(blocks[:, :, :2])[..., None] * ((low | high << 4).float() - 32)
    return Codes(Kind.INT8, _at_places(blocks[:, :, 8:].unflatten(2, (8, 16))), scale.flatten(1), 32)


# Block type -> columns per block, bytes per block in the file, bytes per block in memory, reader.
BLOCKS: dict[str, tuple[int, int, int, Callable[[Tensor], Codes]]] = {
    "q4_0": (32, 18, 18, _q4_0),
    "q4_1": (32, 20, 22, _q4_1),
    "q5_0": (32, 22, 36, _q5_0),
    "q5_1": (32, 24, 40, _q5_1),
    "q8_0": (32, 34, 36, _q8_0),
    "q4_k": (256, 144, 192, _q4_k),
    "q5_k": (256, 176, 320, _q5_k),
    "q6_k": (256, 210, 320, _q6_k),
    "iq4_nl": (32, 18, 36, _iq4_nl),
    "iq4_xs": (256, 136, 288, _iq4_xs),
}
