"""Which experts a token chooses, and their weights: scores of the router's logits, and the rules of a `Routing`.

    scores  = softmax(logits) or sigmoid(logits), float32
    ranks   = scores + correction; minus infinity outside the token's best groups
    experts = the top_k highest ranks, of equal ranks the lower number
    weights = scores of these experts, divided by their sum where the routing says so, times its scale

A token with a NaN among its ranks chooses the experts 0 ... top_k - 1, all with weight NaN: the token's own request
fails as every NaN does, and no other token changes. Users: engine/layers/moe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model_config import Routing


def choose_experts(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32, correction [E] float32 -> experts [T, top_k] int32, weights [T, top_k] float32."""
    return choose_experts_reference(logits, correction, routing)


def choose_experts_reference(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    # A row's softmax does not depend on the other rows. torch's float32 sigmoid does: it computes the end of a tensor
    # by other instructions, whose last bit may differ; float64 hides that bit.
    scores = torch.softmax(logits, -1) if routing.score == "softmax" else logits.double().sigmoid().to(logits.dtype)
    ranks = scores if correction is None else scores + correction
    broken = ranks.isnan().any(-1, keepdim=True)
    scores, ranks = scores.masked_fill(broken, float("nan")), ranks.masked_fill(broken, 0.0)
    if routing.kept_groups < routing.num_groups:
        ranks = ranks.masked_fill(~_of_kept_groups(ranks, routing), float("-inf"))
    chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(-1, chosen)
    if routing.renormalise:
        total = weights[:, :1]
        for slot in range(1, routing.top_k):  # in slot order, whatever the number of tokens
            total = total + weights[:, slot : slot + 1]
        weights = weights / (total + routing.eps).clamp(min=routing.least_sum)
    return chosen.to(torch.int32), weights * routing.scale


def _of_kept_groups(ranks: Tensor, routing: Routing) -> Tensor:
    """[T, E] bool: the experts of each token's best groups."""
    grouped = ranks.unflatten(-1, (routing.num_groups, -1))  # [T, groups, E / groups]
    if routing.group_rank == "maximum":
        of_group = grouped.amax(-1)
    else:
        best = grouped.sort(dim=-1, descending=True).values
        of_group = best[..., 0] + best[..., 1]
    kept = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : routing.kept_groups]
    mask = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, kept, value=True)
    return mask[..., None].expand_as(grouped).flatten(1)
