"""Pairs: the pairs of a token and an expert of a step, sorted by expert, so that an expert's matrix is read once.

In: the experts that the tokens chose, [T, top_k]. Out: the order of pairs in which an expert's pairs lie side by side,
tokens ascending, and where the pairs of each expert end. Users: engine/layers/moe; read by the forms of ExpertsWeight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A pair's number is token * top_k + its place among the token's experts."""

    top_k: int
    order: Tensor  # [pairs] int64: the pairs sorted by expert
    ends: Tensor  # [E] int64: where the pairs of each expert end in that order


def sort_pairs(chosen: Tensor, num_experts: int) -> Pairs:
    """chosen [T, top_k] int32, each from 0 to num_experts - 1."""
    return sort_pairs_reference(chosen, num_experts)


def sort_pairs_reference(chosen: Tensor, num_experts: int) -> Pairs:
    experts = chosen.flatten().long()
    counts = torch.bincount(experts, minlength=num_experts)
    return Pairs(chosen.shape[1], experts.sort(stable=True).indices, counts.cumsum(0))
