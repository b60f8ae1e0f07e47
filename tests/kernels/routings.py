"""Routings with every score, rank and rule, for the tests of all router implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.base.model_config import Routing

ROUTINGS = {
    "softmax": Routing(5, 2),
    "softmax, one": Routing(4, 1),
    "softmax, renormalised": Routing(40, 6, norm_topk_prob=True),
    "softmax, corrected, least sum": Routing(7, 3, correction=True, norm_topk_prob=True, least_sum=0.6),
    "softmax, groups by maximum": Routing(12, 4, n_group=4, topk_group=2, scale=1.8),
    "sigmoid": Routing(13, 6, score="sigmoid", norm_topk_prob=True, eps=1e-6),
    "sigmoid, corrected": Routing(33, 5, score="sigmoid", correction=True, norm_topk_prob=True, eps=1e-20),
    "sigmoid, groups by two": Routing(
        24, 5, score="sigmoid", correction=True, n_group=6, topk_group=3, group_rank="best two",
        norm_topk_prob=True, eps=1e-20, scale=2.5,
    ),
    "softmax, scaled experts": Routing(11, 4, norm_topk_prob=True, scale=0.7, expert_scale=True),
    "sigmoid, scaled experts": Routing(9, 3, score="sigmoid", correction=True, expert_scale=True),
    "near": Routing(16, 2, score="near", nearness=0.37),
    "near, all": Routing(3, 3, score="near", nearness=0.02),
    "all": Routing(6, 6, score="sigmoid"),
}  # fmt: skip


def scales_of(routing: Routing, device: str = "cpu") -> Tensor | None:
    """One factor per expert, if the routing has such factors."""
    return torch.rand(routing.num_experts, device=device) + 0.5 if routing.expert_scale else None
