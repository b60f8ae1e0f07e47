"""Distances: what attention adds to the score of a key by how far it stands before or behind the query.

Thread: device. In: a checkpoint's numbers. Out: `bias` of kernels/attention/dense, float32 [heads, 2 * reach + 1].
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
