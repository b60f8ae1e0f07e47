"""Pairs: a step's (token, expert) pairs, sorted by expert so that each expert's matrix is read once.

In: the experts that the tokens chose, [T, top_k]. Numbers from `num_experts` on mean no expert: padding, or experts of
other ranks. Out: an order of pairs in which an expert's pairs are adjacent,
tokens ascending, and the end of each expert's pairs. Pairs without an expert come after the last
end. On an accelerator each expert has a program, which reads all pairs: it counts the pairs of lower experts and writes
its own pairs after them. So there is one launch, nothing is counted twice and no program waits for another.
Users: engine/layers/moe; read by the forms of ExpertsWeight.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

# Least number of pairs -> (pairs per iteration, warps). Each iteration waits for memory twice.
BLOCKS = {0: (1024, 4), 4096: (4096, 8), 32768: (16384, 16)}


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Sorted pairs; a pair's number is token * top_k + its place among the token's experts."""

    top_k: int
    chosen: Tensor  # [T, top_k] int32
    # [pairs]: the pairs sorted by expert; entries after the last end are arbitrary; None: few pairs, handled one by one
    order: Tensor | None
    ends: Tensor | None  # [E]: the end of each expert's pairs in `order`
    share: float = 1.0  # the part of the pairs that is expected to have an expert here

    @property
    def count(self) -> int:
        """Number of pairs."""
        return self.chosen.numel()


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    order,  # [pairs] int32
    ends,  # [experts] int32
    chosen,  # [pairs] int32
    pairs,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program sorts the pairs of one expert."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    grid_wait(OVERLAP)
    lower = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        each = tl.load(chosen + first + lane, mask=first + lane < pairs, other=expert)
        lower += (each < expert).to(tl.int32)
    start = tl.sum(lower, 0)
    for first in range(0, pairs, BLOCK):
        mine = (tl.load(chosen + first + lane, mask=first + lane < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(mine, 0) - 1, first + lane, mask=mine > 0)
        start += tl.sum(mine, 0)
    tl.store(ends + expert, start)


def sort_pairs(chosen: Tensor, num_experts: int) -> Pairs:
    """Sort the pairs of chosen [T, top_k] int32: experts 0 to num_experts - 1; higher numbers mean no expert."""
    return launch_sort_pairs(chosen, num_experts) if chosen.is_cuda else sort_pairs_reference(chosen, num_experts)


def launch_sort_pairs(chosen: Tensor, num_experts: int) -> Pairs:
    """Launch the Triton kernel."""
    assert chosen.is_contiguous() and chosen.dtype is torch.int32
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    block, warps = BLOCKS[max(least for least in BLOCKS if least <= chosen.numel())]
    sort_kernel[(num_experts,)](order, ends, chosen, chosen.numel(), BLOCK=block, num_warps=warps, **launch_options())
    return Pairs(chosen.shape[1], chosen, order, ends)


def sort_pairs_reference(chosen: Tensor, num_experts: int) -> Pairs:
    experts = chosen.flatten().long()
    counts = torch.bincount(experts, minlength=num_experts)
    return Pairs(chosen.shape[1], chosen, experts.sort(stable=True).indices, counts[:num_experts].cumsum(0))
