"""Log-probabilities of sampled tokens, and the division of many rows into batches.

Runs on the stream. Out: TokenLogprob objects in plain Python numbers, ready to cross to the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from engine.base.request import SamplingParams, TokenLogprob
from engine.kernels.sampling.logprobs import log_sum, logprobs
from engine.kernels.sampling.top_k_top_p import top_k_top_p
from engine.kernels.sampling.xtc import xtc

CHUNK = 64  # prompt positions whose logits [chunk, vocab] exist at a time
TOP_MAX = 256  # most top tokens of a normal row; rows that want more are computed separately


def answer_logprobs(
    logits: dict[int, torch.Tensor], tokens: np.ndarray, wanted: dict[int, SamplingParams], as_logits: bool = False
) -> dict[int, TokenLogprob]:
    """Row -> the sampled token's log-probability (or logit) and rank, the k most likely tokens, and the requested ids.

    logits: row -> float32 [vocab], raw or processed as configured.
    """
    found = {}
    for row, params in wanted.items():
        line = logits[row][None, :]  # [1, vocab]
        k = line.shape[1] if params.logprobs == -1 else min(params.logprobs or 0, line.shape[1])
        entry = _entries(line, np.asarray([tokens[row]]), k, as_logits)[0]
        if params.logprob_token_ids:
            values = line.gather(1, torch.tensor([params.logprob_token_ids]))[0]
            entry.top_ids += list(params.logprob_token_ids)
            entry.top_logprobs += (values if as_logits else values - log_sum(line)).tolist()
        found[row] = entry
    return found


def processed(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, likely: float
) -> torch.Tensor:
    """The logits float32 [vocab] from which a token is drawn, -inf for impossible tokens. Greedy rows are not scaled.

    logits float32 [vocab], after the row's rules and top-n-sigma; likely: XTC's threshold if it applies, else 1.
    """
    if temperature == 0.0:
        return logits.clone()
    line = logits[None, :] / temperature  # [1, vocab]
    one = torch.ones(1)
    probs = top_k_top_p(line, one, torch.tensor([top_k]), one * top_p, one * min_p)[0]
    accepted = (xtc(probs, likely) if likely < 1.0 else probs) > 0
    return line[0].masked_fill(~accepted, float("-inf"))


def together(wanted: np.ndarray, vocab: int) -> Iterator[tuple[np.ndarray, int]]:
    """Batches of ascending rows, with the number of top tokens that each row of the batch gets.

    wanted int [n], by row. Rows with k > TOP_MAX are batched separately, so that the lines of other rows stay narrow.
    Rows with k = vocab are batched separately too, because equal values may be ordered differently.
    """
    apart = np.where((wanted > TOP_MAX) | (wanted == vocab), wanted, -1)
    for kind in np.unique(apart):
        rows = np.flatnonzero(apart == kind)
        yield rows, int(wanted[rows].max())


def _entries(logits: torch.Tensor, tokens: np.ndarray, k: int, as_logits: bool) -> list[TokenLogprob]:
    own, rank, ids, values = logprobs(logits, torch.from_numpy(tokens.astype(np.int64)), k, as_logits)
    rows = zip(tokens.tolist(), own.tolist(), rank.tolist(), ids.tolist(), values.tolist())
    return [TokenLogprob(*row) for row in rows]
