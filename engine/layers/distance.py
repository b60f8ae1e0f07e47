"""Distance biases: values that attention adds to a score, depending on the signed distance of key and query.

Thread: device. In: learned values of a checkpoint, or none. Out: float32 [heads, 2 * reach + 1],
the `bias` of kernels/attention/dense.
"""

from __future__ import annotations

import math
from copy import copy

import torch
from torch import Tensor

from engine.base.dealing import Section
from engine.kernels.gemm.pack import Placement
from engine.weights.table import Wanted

BUCKETS = 32
REACH = 128  # keys at larger distances share a bucket


class Buckets:
    """A learned bias per head and bucket of distances (https://arxiv.org/abs/1910.10683, section 2.1)."""

    bias: Tensor

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.columns = (Section(num_heads),)  # how ranks share the biases

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"weight": (Wanted((BUCKETS, self.num_heads)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces["weight"]
        assert piece is not None
        rows = piece.float().index_select(0, bucket_of(torch.arange(-REACH, REACH + 1)).to(piece.device))
        self.bias = rows.t().to(placement.device).contiguous()


def bucket_of(away: Tensor) -> Tensor:
    """The bucket of a key `away` tokens after the query: near distances have separate buckets, far ones logarithmic.

    Computed in float32 as in transformers, so that bucket edges are equal.
    """
    half = BUCKETS // 2
    near = half // 2
    far = away.abs().clamp(min=1).float()
    shared = near + (torch.log(far / near) / math.log(REACH / near) * (half - near)).long()
    return (away > 0).long() * half + torch.where(away.abs() < near, away.abs(), shared.clamp(max=half - 1))


def log_buckets(away: Tensor, count: int, longest: int) -> Tensor:
    """Distances -> DeBERTa's buckets: near distances are their own buckets, far distances share logarithmic buckets,
    and `longest` - 1 is in bucket count - 1. Computed in float32 as in transformers."""
    near = count // 2
    far = away.abs().clamp(min=near).float() / near
    shared = torch.ceil(torch.log(far) / torch.log(torch.tensor((longest - 1) / near)) * (near - 1)) + near
    return torch.where(away.abs() <= near, away, (shared * away.sign()).long())


class Slopes:
    """ALiBi: scores decrease linearly with the distance of query and key, on both sides, with a fixed slope per head.

    https://arxiv.org/abs/2108.12409
    """

    def __init__(self, num_heads: int, longest: int, device: str) -> None:
        """`longest`: tokens of the longest input, at least 2."""
        away = torch.arange(1 - longest, longest).abs().float()
        self.bias: Tensor = (torch.tensor(slopes_of(num_heads))[:, None] * -away).to(device)

    def of_heads(self, first: int, end: int, device: str) -> Slopes:
        """The slopes of a rank that has these of all heads."""
        own = copy(self)
        own.bias = self.bias[first:end].contiguous().to(device)
        return own


def slopes_of(num_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... for a power of two n; other numbers of heads add every second slope of 2n heads."""
    power = 1 << num_heads.bit_length() - 1
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else slopes + slopes_of(2 * power)[::2][: num_heads - power]
