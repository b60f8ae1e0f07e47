"""Distances: what attention adds to the score of a key by how far it stands before or behind the query.

Thread: device. In: a checkpoint's numbers, or none. Out: float32 [heads, 2 * reach + 1],
the `bias` of kernels/attention/dense.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.kernels.gemm.pack import Placement
from engine.weights.table import Wanted

BUCKETS = 32
REACH = 128  # keys that are farther away share a bucket


class Buckets:
    """A learned number for each head and each bucket of distances (https://arxiv.org/abs/1910.10683, section 2.1)."""

    bias: Tensor

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"weight": (Wanted((BUCKETS, self.num_heads)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces["weight"]
        assert piece is not None
        rows = piece.float().index_select(0, bucket_of(torch.arange(-REACH, REACH + 1)).to(piece.device))
        self.bias = rows.t().to(placement.device).contiguous()


def bucket_of(away: Tensor) -> Tensor:
    """The bucket of a key `away` tokens behind the query: near ones have their own, farther ones share logarithmically.

    float32, as transformers computes: a bucket's edge must not move.
    """
    half = BUCKETS // 2
    near = half // 2
    far = away.abs().clamp(min=1).float()
    shared = near + (torch.log(far / near) / math.log(REACH / near) * (half - near)).long()
    return (away > 0).long() * half + torch.where(away.abs() < near, away.abs(), shared.clamp(max=half - 1))


def log_buckets(away: Tensor, count: int, longest: int) -> Tensor:
    """Distances in DeBERTa's buckets, -count to count and beyond: near ones are their own, farther ones share
    logarithmically, and `longest` - 1 is in bucket count - 1. float32, as transformers computes."""
    near = count // 2
    far = away.abs().clamp(min=near).float() / near
    shared = torch.ceil(torch.log(far) / torch.log(torch.tensor((longest - 1) / near)) * (near - 1)) + near
    return torch.where(away.abs() <= near, away, (shared * away.sign()).long())


class Slopes:
    """ALiBi: a score sinks by a fixed slope of each head for every token between query and key, on both sides.

    https://arxiv.org/abs/2108.12409
    """

    def __init__(self, num_heads: int, longest: int, device: str) -> None:
        """`longest`: tokens of an input, at least 2."""
        away = torch.arange(1 - longest, longest).abs().float()
        self.bias: Tensor = (torch.tensor(slopes_of(num_heads))[:, None] * -away).to(device)


def slopes_of(num_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... for a power of two n; other numbers of heads take every second of twice as many."""
    power = 1 << num_heads.bit_length() - 1
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else slopes + slopes_of(2 * power)[::2][: num_heads - power]
