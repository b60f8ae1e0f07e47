"""Lines of bits, one bit per token: bit t of a line is bit t % 32 of its word t // 32. Users: rules, dry."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import tl, triton


@triton.jit
def bits_at(table, token, inside):
    """Whether each token's bit is set in a line of bits."""
    return ((tl.load(table + (token >> 5), mask=inside, other=0) >> (token & 31)) & 1) != 0


def unpack(words: Tensor, vocab: int) -> Tensor:
    """Unpack one line of bits, int32 [words], to bool [vocab]."""
    return ((words[:, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1).bool().reshape(-1)[:vocab]
