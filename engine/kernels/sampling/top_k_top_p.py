"""Temperature, min-p, top-k and top-p: logits -> probabilities of the tokens that may be drawn.

    p = softmax(logits / t);  keep p >= min_p * max(p);  keep the k largest;  keep the smallest set whose sum >= top_p

Used by engine/sampling/sampler for rows with temperature > 0. All ties at the k-th value stay.
"""

from __future__ import annotations

import torch


def top_k_top_p(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return unnormalised probabilities, float32 [rows, vocab]; 0 for tokens that may not be drawn.

    logits float32 [rows, vocab] (-inf allowed); temperature, top_p, min_p float32 [rows]; top_k int64 [rows], 0 = off.
    A row's result depends only on that row.
    """
    return top_k_top_p_reference(logits, temperature, top_k, top_p, min_p)


def top_k_top_p_reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Specification in plain torch."""
    probs = torch.softmax(logits / temperature[:, None], dim=-1)  # [rows, vocab]
    if bool((min_p > 0).any()):
        floor = min_p[:, None] * probs.amax(dim=-1, keepdim=True)
        probs = torch.where(probs < floor, 0.0, probs)
    cut = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]
    if len(cut):
        probs[cut] = _keep_largest(probs[cut], top_k[cut], top_p[cut])
    return probs


def _keep_largest(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    vocab = probs.shape[-1]
    ordered = probs.sort(dim=-1, descending=True).values  # [rows, vocab]
    last = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab) - 1
    kth = ordered.gather(1, last[:, None])  # smallest value that top-k keeps
    # top-p applies to the renormalised probabilities that top-k and min-p left.
    ordered = torch.where(ordered < kth, 0.0, ordered)
    total = ordered.double().cumsum(dim=-1)
    before = total - ordered  # mass of everything larger
    inside = before < top_p[:, None].double() * total[:, -1:]
    smallest = torch.where(inside & (ordered > 0), ordered, torch.inf).amin(dim=-1, keepdim=True)
    # With top_p off every value stays, including values after which rounding makes the sum exceed 1.
    threshold = torch.where(top_p[:, None] < 1, torch.maximum(kth, smallest), kth)
    return torch.where(probs < threshold, 0.0, probs)
