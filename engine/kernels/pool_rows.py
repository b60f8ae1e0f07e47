"""One row for each input, pooled from the hidden states of its tokens, in float32.

mean           sum(h) / n                        mean_sqrt_len  sum(h) / sqrt(n)
weighted_mean  sum(i h_i) / sum(i), i from 1     max            the maximum of each column
`counted`: the first token of each input that counts. Earlier tokens (a prompt) contribute nothing, but i counts them.
Users: engine/pooling/heads. Inputs without tokens, which pad a recorded step, get zeros.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from engine.base.model_config import PoolingKind
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

KINDS = {"mean": 0, "mean_sqrt_len": 1, "weighted_mean": 2, "max": 3}
BLOCK_TOKENS, BLOCK_WIDTH = 16, 128


@triton.jit
def pool_kernel(
    out,  # [rows, width] float32
    hidden,  # [tokens, width]
    starts,  # [rows + 1] int32
    counted,  # [rows] int32; not read if SKIPS is False
    width,
    KIND: tl.constexpr,  # a number of KINDS
    SKIPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program pools BLOCK_W columns of one input."""
    grid_wait(OVERLAP)
    row = tl.program_id(0)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < width
    total = tl.full([BLOCK_W], float("-inf") if KIND == 3 else 0.0, tl.float32)
    skipped = 0
    if SKIPS:
        skipped = tl.minimum(tl.load(counted + row), last - first)
    for start in range(first + skipped, last, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        there = (token < last)[:, None] & inside[None, :]
        where = hidden + token.to(tl.int64)[:, None] * width + column[None, :]
        if KIND == 3:
            values = tl.load(where, mask=there, other=float("-inf")).to(tl.float32)
            total = tl.maximum(total, tl.max(values, 0), propagate_nan=tl.PropagateNan.ALL)
        else:
            values = tl.load(where, mask=there, other=0.0).to(tl.float32)
            if KIND == 2:
                values = values * (token - first + 1).to(tl.float32)[:, None]
            total += tl.sum(values, 0)
    count = (last - first - skipped).to(tl.float32)
    if KIND == 0:
        total = total / tl.maximum(count, 1.0)
    elif KIND == 1:
        total = total / tl.sqrt_rn(tl.maximum(count, 1.0))
    elif KIND == 2:
        total = total / tl.maximum(count * (count + 1.0 + 2 * skipped) * 0.5, 1.0)
    tl.store(out + row.to(tl.int64) * width + column, tl.where(count > 0.0, total, 0.0), mask=inside)


def pool_rows(hidden: Tensor, starts: Tensor, kind: PoolingKind, counted: Tensor | None = None) -> Tensor:
    """Pool hidden [T, width] into a new float32 [rows, width].

    starts: int32 [rows + 1], ascending, at most T. counted: int32 [rows], or None: all tokens count.
    """
    pool = launch_pool if hidden.is_cuda else pool_rows_reference
    return pool(hidden, starts, kind, counted)


def launch_pool(hidden: Tensor, starts: Tensor, kind: PoolingKind, counted: Tensor | None = None) -> Tensor:
    """Launch the kernel on a grid that depends only on shapes."""
    rows, width = len(starts) - 1, hidden.shape[1]
    assert hidden.is_contiguous(), "rows must be contiguous"
    assert starts.is_contiguous(), "their bounds must be contiguous"
    assert starts.dtype is torch.int32, "bounds are int32"
    out = torch.empty(rows, width, dtype=torch.float32, device=hidden.device)
    if rows:
        pool_kernel[(rows, triton.cdiv(width, BLOCK_WIDTH))](
            out, hidden, starts, starts if counted is None else counted, width, KIND=KINDS[kind],
            SKIPS=counted is not None, BLOCK_T=BLOCK_TOKENS, BLOCK_W=BLOCK_WIDTH, num_warps=4, **launch_options(),
        )  # fmt: skip
    return out


def pool_rows_reference(hidden: Tensor, starts: Tensor, kind: PoolingKind, counted: Tensor | None = None) -> Tensor:
    out = torch.zeros(len(starts) - 1, hidden.shape[1], device=hidden.device)
    bounds = starts.tolist()
    before = [0] * len(out) if counted is None else counted.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        skipped = before[row]
        count, part = last - first - skipped, hidden[first + skipped : last].float()
        if count <= 0:
            continue
        if kind == "max":
            out[row] = part.max(0).values
        elif kind == "weighted_mean":
            weights = torch.arange(skipped + 1, skipped + count + 1, device=hidden.device, dtype=torch.float32)[:, None]
            out[row] = (part * weights).sum(0) / (count * (count + 1 + 2 * skipped) / 2)
        else:
            out[row] = part.sum(0) / (count if kind == "mean" else count**0.5)
    return out
