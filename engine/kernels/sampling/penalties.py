"""Presence, frequency and repetition penalties on one row of logits.

    l = l / r if l > 0 else l * r        for every token of the prompt or the answer (r: repetition)
    l = l - frequency * count - presence * (count > 0)        count: times in the answer

Used by engine/sampling/rules. Source of the formulas: OpenAI's API reference and Keskar et al. 2019 (CTRL).
"""

from __future__ import annotations

import torch


def penalties(
    logits: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    """Change logits float32 [vocab] in place. counts int32 [vocab]: tokens of the answer; in_prompt bool [vocab]."""
    penalties_reference(logits, counts, in_prompt, presence, frequency, repetition)


def penalties_reference(
    logits: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    """Specification in plain torch."""
    said = counts > 0
    if repetition != 1.0:
        seen = said | in_prompt
        logits.copy_(torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits))
    if frequency:
        logits.sub_(counts, alpha=frequency)
    if presence:
        logits.sub_(said.to(logits.dtype), alpha=presence)
