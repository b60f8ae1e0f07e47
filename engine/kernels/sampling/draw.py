"""Draws one token per row from probabilities, with a random number computed from (seed, place in the answer).

    u = hash(seed, index) in [0, 1);  token = first i with p_0 + ... + p_i > u * sum(p)

There is no generator state: a request gets the same tokens in every batch, preempted or not. The hash is
SplitMix64's finaliser over two words (Steele, Lea, Flood 2014). Used by engine/sampling/sampler.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)


def mix64(word: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser over uint64 words: every input bit affects every output bit."""
    with np.errstate(over="ignore"):
        word = (word ^ (word >> np.uint64(30))) * _M1
        word = (word ^ (word >> np.uint64(27))) * _M2
        return word ^ (word >> np.uint64(31))


def uniform(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return float64 [rows] in [0, 1) from seed uint64 [rows] and index int64 [rows]."""
    with np.errstate(over="ignore"):
        word = mix64(mix64(seed + _GOLDEN) + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(probs: torch.Tensor, seed: np.ndarray, index: np.ndarray) -> torch.Tensor:
    """Draw token ids int64 [rows] from probs float32 [rows, vocab] >= 0, each row with a positive sum; see
    `uniform`."""
    return draw_reference(probs, seed, index)


def draw_reference(probs: torch.Tensor, seed: np.ndarray, index: np.ndarray) -> torch.Tensor:
    """Specification in plain torch; sums are float64, so that 150,000 small numbers do not accumulate errors."""
    total = probs.double().cumsum(dim=-1)  # [rows, vocab]
    want = torch.from_numpy(uniform(seed, index))[:, None] * total[:, -1:]
    token = torch.searchsorted(total, want, right=True)[:, 0]
    # u * sum may round up to the sum; then the last token with a positive probability is drawn.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(token, last)
