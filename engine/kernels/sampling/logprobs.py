"""Log-probabilities of given tokens, their rank, and the k most likely, row by row.

    logprob = logit - logsumexp(logits);  rank = 1 + number of strictly larger logits

Used by engine/sampling/logprobs for answers and prompts; never holds a second [rows, vocab] array of float32.
"""

from __future__ import annotations

import torch


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int, as_logits: bool = False) -> tuple[torch.Tensor, ...]:
    """(logprob [rows], rank int64 [rows], top ids int64 [rows, k], top logprobs float32 [rows, k], descending).

    logits float32 [rows, vocab]; tokens int64 [rows]; k >= 0. With `as_logits` the values are the logits themselves.
    """
    return logprobs_reference(logits, tokens, k, as_logits)


def logprobs_reference(
    logits: torch.Tensor, tokens: torch.Tensor, k: int, as_logits: bool = False
) -> tuple[torch.Tensor, ...]:
    """The specification, in plain torch."""
    norm = logits.new_zeros(len(logits)) if as_logits else torch.logsumexp(logits, dim=-1)  # [rows]
    own = logits.gather(1, tokens[:, None])  # [rows, 1]
    rank = (logits > own).sum(dim=-1) + 1
    values, ids = logits.topk(k, dim=-1)
    return own[:, 0] - norm, rank, ids, values - norm[:, None]
