"""Runs the few PTX instructions of the kernels' inline assembly on NumPy arrays, so no card is needed.

In: the text, and an array of uint32 for each operand $n that the text reads. Out: the arrays of the written operands.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

Words = Any  # an array of uint32


def halves(word: Words) -> np.ndarray:
    """The two bfloat16 in each word -> float64 [2, ...]."""
    parts = np.stack([word << np.uint32(16), word & np.uint32(0xFFFF0000)])
    return parts.view(np.float32).astype(np.float64)


def joined(values: np.ndarray) -> Words:
    """Packs numbers [2, ...] into words; the numbers must be exact in bfloat16."""
    bits = values.astype(np.float32).view(np.uint32)
    assert not (bits & np.uint32(0xFFFF)).any(), "a product was rounded"
    return (bits[0] >> np.uint32(16)) | bits[1]


def permuted(a: Words, b: Words, selector: Words) -> Words:
    """prmt: selects four of the eight bytes; with 8 in the selector, the byte's highest bit, repeated."""
    both = [(word >> np.uint32(8 * byte)) & np.uint32(0xFF) for word in (a, b) for byte in range(4)]
    both += [(byte >> np.uint32(7)) * np.uint32(0xFF) for byte in both]
    made = np.uint32(0)
    for place in range(4):
        number = selector >> np.uint32(4 * place) & np.uint32(15)
        made = made | np.choose(number, np.broadcast_arrays(number, *both)[1:]) << np.uint32(8 * place)
    return made


def looked_up(a: Words, b: Words, c: Words, table: Words) -> Words:
    """lop3: any bitwise function of three inputs."""
    made = np.uint32(0)
    for case in range(8):
        if int(table[0]) >> case & 1:
            bits = [word if case >> place & 1 else ~word for word, place in ((a, 2), (b, 1), (c, 0))]
            made = made | (bits[0] & bits[1] & bits[2])
    return made


def from_e4m3(pair: Words) -> Words:
    """cvt: two float16 from the two codes, one per half of the word."""
    known = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().view(torch.int16).numpy()
    low, high = (known.view(np.uint16)[pair >> np.uint32(8 * byte) & np.uint32(0xFF)] for byte in range(2))
    return low | high.astype(np.uint32) << np.uint32(16)


def quarters(word: Words) -> np.ndarray:
    """The four e4m3 in each word -> float64 [4, ...]."""
    known = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    return np.stack([known[word >> np.uint32(8 * place) & np.uint32(0xFF)] for place in range(4)])


def multiplied(first: list[Words], second: list[Words], sums: list[Words], e4m3: bool) -> list[np.ndarray]:
    """mma.m16n8k16 of bfloat16, or m16n8k32 of e4m3: sums + first @ second; each array holds the warp's 32 threads."""
    group, inside = np.arange(32) // 4, np.arange(32) % 4
    parts, each = (quarters, 4) if e4m3 else (halves, 2)
    a, b, c = np.zeros((16, 8 * each)), np.zeros((8 * each, 8)), np.zeros((16, 8))
    for part in range(each):
        for number, word in enumerate(first):
            a[group + 8 * (number % 2), each * inside + part + 4 * each * (number // 2)] = parts(word)[part]
        for number, word in enumerate(second):
            b[each * inside + part + 4 * each * number, group] = parts(word)[part]
    places = [(group + 8 * (number // 2), 2 * inside + number % 2) for number in range(4)]
    for place, each in zip(places, sums):
        c[place] = each
    c += a @ b
    return [c[place] for place in places]


RUN = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "mov.u32": lambda a: a,
    "setp.eq.u32": lambda a, b: a == b,
    "selp.f32": lambda a, b, first: np.where(first, a, b),
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "shl.b32": lambda a, by: a << by,
    "shr.u32": lambda a, by: a >> by,
    "shr.s32": lambda a, by: (a.view(np.int32) >> by.view(np.int32)).view(np.uint32),
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
    "fma.rn.bf16x2": lambda a, b, c: joined(halves(a) * halves(b) + halves(c)),
}


def run(text: str, operands: dict[str, Words]) -> dict[str, Words]:
    """Runs the text; returns the final value of every name."""
    held = dict(operands)

    def value(name: str) -> Words:
        if name.startswith("{"):  # two halves
            low, high = (held[part] for part in name.strip("{}").split(", "))
            return low | high << np.uint32(16)
        if name.startswith("0f"):
            return np.array([int(name[2:], 16)], np.uint32).view(np.float32)
        return held[name] if name in held else np.array([int(name, 0)], np.uint32)

    for line in text.strip().strip("{}").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation and operation != ".reg":
            target, *sources = re.split(r", (?![^{]*})", rest)
            if operation.startswith("mma."):
                operands = ([held[name] for name in source.strip("{}").split(", ")] for source in sources)
                made = multiplied(*operands, "e4m3" in operation)
                held.update(zip(target.strip("{}").split(", "), made))
                continue
            made = RUN[operation](*map(value, sources))
            if target.startswith("{"):
                low, high = target.strip("{}").split(", ")
                held[low], held[high] = made & np.uint32(0xFFFF), made >> np.uint32(16)
            else:
                held[target] = made
    return held
