"""Tokens that a row may draw, as a line of bits: all others get -inf added.

    logits[row, token] += 0 if bit `token` of line[row] else -inf

Bit t of a line is bit t % 32 of its word t // 32. Users: engine/sampling/device (allowed_token_ids).
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import tl, triton

BLOCK = 1024


@triton.jit
def bits_at(words, token, inside):
    """Whether each token's bit is set in a line of words."""
    word = tl.load(words + (token >> 5), mask=inside, other=0)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def mask_kernel(
    logits,  # [rows, vocab] float32
    bits,  # [lines, words] int32
    line,  # [rows] int32; -1: the row may draw anything
    vocab,
    words,
    BLOCK: tl.constexpr,
):
    """BLOCK tokens of one row per program."""
    row = tl.program_id(1)
    number = tl.load(line + row).to(tl.int64)
    if number >= 0:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        banned = bits_at(bits + number * words, token, inside) == 0
        place = logits + row.to(tl.int64) * vocab + token
        tl.store(place, tl.load(place, mask=inside, other=0.0) + float("-inf"), mask=inside & banned)


def mask(logits: Tensor, bits: Tensor, line: Tensor) -> None:
    """Changes logits float32 [rows, vocab] in place; bits int32 [lines, ceil(vocab / 32)], line int32 [rows]."""
    if not logits.is_cuda:
        mask_reference(logits, bits, line)
        return
    launch_mask(logits, bits, line)


def launch_mask(logits: Tensor, bits: Tensor, line: Tensor) -> None:
    """The kernel."""
    rows, vocab = logits.shape
    assert logits.is_contiguous() and bits.is_contiguous() and len(line) == rows and bits.shape[1] * 32 >= vocab
    if rows:
        mask_kernel[(triton.cdiv(vocab, BLOCK), rows)](logits, bits, line, vocab, bits.shape[1], BLOCK=BLOCK)


def mask_reference(logits: Tensor, bits: Tensor, line: Tensor) -> None:
    for row, number in enumerate(line.tolist()):
        if number >= 0:
            logits[row] += torch.where(unpack(bits[number], logits.shape[1]), 0.0, float("-inf"))


def unpack(words: Tensor, vocab: int) -> Tensor:
    """bool [vocab] of one line of bits int32 [words]."""
    return ((words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).bool().reshape(-1)[:vocab]
