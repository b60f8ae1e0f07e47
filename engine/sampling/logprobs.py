"""Log-probabilities as clients ask for them: of sampled tokens, and of a prompt's own tokens in chunks.

Runs on the stream. Out: TokenLogprob objects in plain Python numbers, ready to cross to the loop.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.kernels.sampling.logprobs import logprobs
from engine.request import SamplingParams, TokenLogprob

CHUNK = 64  # prompt positions whose [chunk, vocab] logits exist at a time


def answer_logprobs(
    raw: dict[int, torch.Tensor], tokens: np.ndarray, wanted: dict[int, SamplingParams]
) -> dict[int, TokenLogprob]:
    """By row: the sampled token's log-probability of the raw logits, its rank, the k most likely, the ids asked for."""
    found = {}
    for row, params in wanted.items():
        logits = raw[row][None, :]  # [1, vocab]
        k = logits.shape[1] if params.logprobs == -1 else min(params.logprobs or 0, logits.shape[1])
        entry = _entries(logits, np.asarray([tokens[row]]), k)[0]
        if params.logprob_token_ids:
            ids = torch.tensor([params.logprob_token_ids])
            values = (logits.gather(1, ids) - torch.logsumexp(logits, dim=-1)[:, None])[0]
            entry.top_ids += list(params.logprob_token_ids)
            entry.top_logprobs += values.tolist()
        found[row] = entry
    return found


def prompt_logprobs(
    project: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, next_tokens: np.ndarray, k: int
) -> list[TokenLogprob]:
    """For hidden [n, hidden_size] of prompt positions and the tokens that follow them, one TokenLogprob each.

    `project` makes float32 logits; only CHUNK rows of them exist at a time.
    """
    found: list[TokenLogprob] = []
    for start in range(0, len(next_tokens), CHUNK):
        logits = project(hidden[start : start + CHUNK])  # [chunk, vocab]
        width = logits.shape[1] if k == -1 else min(k, logits.shape[1])
        found += _entries(logits, next_tokens[start : start + CHUNK], width)
    return found


def _entries(logits: torch.Tensor, tokens: np.ndarray, k: int) -> list[TokenLogprob]:
    own, rank, ids, values = logprobs(logits, torch.from_numpy(tokens.astype(np.int64)), k)
    rows = zip(tokens.tolist(), own.tolist(), rank.tolist(), ids.tolist(), values.tolist())
    return [TokenLogprob(*row) for row in rows]
