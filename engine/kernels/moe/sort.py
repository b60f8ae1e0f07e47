"""Pairs: the pairs of a token and an expert of a step, sorted by expert, so that an expert's matrix is read once.

In: the experts that the tokens chose, [T, top_k]. Out: the order of pairs in which an expert's pairs lie side by side,
tokens ascending, and where the pairs of each expert end. Pairs of padding, whose expert is `num_experts`, are behind
the last end. On an accelerator each expert has a program, which reads all
pairs: it counts those of lower experts, and writes its own behind them. So there is one launch, nothing is counted
twice and no program waits for another. Users: engine/layers/moe; read by the forms of ExpertsWeight.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

# Pairs that a program looks at, at a time, and warps, by the least number of pairs: each turn waits for memory twice.
BLOCKS = {0: (1024, 4), 4096: (4096, 8), 32768: (16384, 16)}


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A pair's number is token * top_k + its place among the token's experts."""

    top_k: int
    chosen: Tensor  # [T, top_k] int32
    # [pairs]: the pairs sorted by expert, any behind the last end; None: few pairs, each goes to its expert by itself
    order: Tensor | None
    ends: Tensor | None  # [E]: where the pairs of each expert end in that order

    @property
    def count(self) -> int:
        """How many there are."""
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
    """The pairs of one expert per program."""
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
    """chosen [T, top_k] int32, each from 0 to num_experts - 1, or num_experts: no expert."""
    return launch_sort_pairs(chosen, num_experts) if chosen.is_cuda else sort_pairs_reference(chosen, num_experts)


def launch_sort_pairs(chosen: Tensor, num_experts: int) -> Pairs:
    """The Triton kernel."""
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
