"""Top-n-sigma: a bound for the logits of a row, n standard deviations below its largest logit.

    x stays if x >= max - n * sigma;  sigma^2 = mean((x - mean)^2) over the finite logits, after the rules

`groups` writes the moments of each TILE of groups while it reads the logits; `cut` joins them and applies the bound
together with min-p. The order of the sums does not depend on the number of rows. Greedy rows draw the same token with
and without the bound; it shows in their processed log-probabilities. Source: Tang et al. 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SamplerWord
from engine.kernels.target import tl, triton

TOP_N_SIGMA = tl.constexpr(int(SamplerWord.TOP_N_SIGMA))
MOMENTS = 3  # number of finite logits, their mean, sum of squared distances from the mean
LINE_OF_MOMENTS = tl.constexpr(MOMENTS)


@triton.jit
def moments_of(x):
    """Return the three moments of the finite logits in x [groups, GROUP]."""
    finite = (x > float("-inf")) & (x < float("inf"))
    count = tl.sum(tl.sum(finite.to(tl.float32), 1), 0)
    mean = tl.sum(tl.sum(tl.where(finite, x, 0.0), 1), 0) / tl.maximum(count, 1.0)
    away = tl.where(finite, x - mean, 0.0)
    return count, mean, tl.sum(tl.sum(away * away, 1), 0)


@triton.jit
def join_moments(count, mean, square, count_b, mean_b, square_b):
    """Return the moments of two disjoint sets together (Chan et al. 1979)."""
    both = tl.maximum(count + count_b, 1.0)
    apart = mean_b - mean
    return (
        count + count_b,
        mean + apart * (count_b / both),
        square + square_b + apart * apart * (count * (count_b / both)),
    )


@triton.jit
def reach_of(moments, n, num_tiles, TILES: tl.constexpr):
    """Return n * sigma of a row from its moments [num_tiles, MOMENTS]; TILES is a power of two >= num_tiles."""
    tile = tl.arange(0, TILES)
    here = tile < num_tiles
    count = tl.load(moments + LINE_OF_MOMENTS * tile, mask=here, other=0.0)
    mean = tl.load(moments + LINE_OF_MOMENTS * tile + 1, mask=here, other=0.0)
    square = tl.load(moments + LINE_OF_MOMENTS * tile + 2, mask=here, other=0.0)
    total = tl.maximum(tl.sum(count, 0), 1.0)
    apart = mean - tl.sum(mean * (count / total), 0)
    return n * tl.sqrt(tl.sum(square / total + apart * apart * (count / total), 0))


def moments_reference(line: Tensor, tile: int) -> Tensor:
    """Specification: moments [tiles, MOMENTS] of each `tile` tokens of line float32 [vocab]."""
    found = []
    for part in line.split(tile):
        finite = part[part.isfinite()].double()
        mean = finite.sum() / max(len(finite), 1)
        found.append([len(finite), float(mean), float(((finite - mean) ** 2).sum())])
    return torch.tensor(found)


def top_n_sigma(logits: Tensor, n: float) -> float:
    """Return the smallest logit that stays in a row of logits float32 [vocab]."""
    return top_n_sigma_reference(logits, n)


def top_n_sigma_reference(logits: Tensor, n: float) -> float:
    """Specification, over float64; -inf for a row without finite logits."""
    finite = logits[logits.isfinite()].double()
    if not len(finite):
        return float("-inf")
    return float(finite.max() - n * torch.sqrt(((finite - finite.mean()) ** 2).mean()))
