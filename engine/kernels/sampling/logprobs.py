"""Log-probabilities and ranks of given tokens, and the k most likely tokens, for each row.

    logprob = logit - log(sum(exp(logits)));  rank = 1 + number of strictly larger logits

A row's results have the same bits for any other rows and any number of rows. torch's own functions do not guarantee
this: its sum over a vocabulary depends on the number of rows (two rows in a hundred differed in their last bit on an
H100), and its order of equal logits depends on k. Here one program sums a row, and among equal logits the lowest token
id comes first. Used by engine/sampling for answers and prompts, for a few dozen rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import tl, triton

BLOCK = 4096  # logits that a program reads at a time


@triton.jit
def log_sum_kernel(
    out,  # [rows] float32
    logits,  # [rows, vocab] float32
    vocab,
    BLOCK: tl.constexpr,
):
    """A program sums one row: each lane tracks its largest logit and its sum relative to it, always in the same
    order."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
        higher = tl.maximum(best, x)
        beside = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)  # avoids inf - inf
        total = total * tl.exp(best - beside) + tl.exp(x - beside)
        best = higher
    highest = tl.max(best, 0)
    beside = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    tl.store(out + row, tl.log(tl.sum(total * tl.exp(best - beside), 0)) + beside)


def log_sum(logits: Tensor) -> Tensor:
    """Return log(sum(exp(logits))) of each row, float32 [rows]; logits float32 [rows, vocab], contiguous."""
    return launch_log_sum(logits) if logits.is_cuda else log_sum_reference(logits)


def launch_log_sum(logits: Tensor) -> Tensor:
    """Launch the Triton kernel."""
    rows, vocab = logits.shape
    assert logits.is_contiguous()
    assert logits.dtype is torch.float32
    out = logits.new_empty(rows)
    if rows:
        log_sum_kernel[(rows,)](out, logits, vocab, BLOCK=BLOCK, num_warps=8)
    return out


def log_sum_reference(logits: Tensor) -> Tensor:
    out = logits.new_empty(len(logits))
    for row, line in enumerate(logits):  # threads divide a matrix by rows, but a single row within itself
        out[row] = torch.logsumexp(line, dim=-1)
    return out


def logprobs(logits: Tensor, tokens: Tensor, k: int, as_logits: bool = False) -> tuple[Tensor, ...]:
    """Return logprob [rows], rank int64 [rows], top ids int64 [rows, k], top logprobs float32 [rows, k], descending.

    logits float32 [rows, vocab]; tokens int64 [rows]; k >= 0. as_logits: return logits in place of logprobs.
    """
    norm = logits.new_zeros(len(logits)) if as_logits else log_sum(logits)
    own = logits.gather(1, tokens[:, None])  # [rows, 1]
    rank = (logits > own).sum(dim=-1) + 1
    ids = most_likely(logits, k)
    return own[:, 0] - norm, rank, ids, logits.gather(1, ids) - norm[:, None]


def most_likely(logits: Tensor, k: int) -> Tensor:
    """Return the k tokens with the largest logits, int64 [rows, k], lowest id first among equals; float32 logits."""
    vocab = logits.shape[1]
    if k in (0, vocab):  # then the order of equal logits cannot change the set of tokens
        return logits.topk(k, dim=-1).indices
    bits = logits.view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # int64 keys with the order of the logits
    keys <<= 32
    keys |= torch.arange(vocab - 1, -1, -1, device=logits.device)  # keys are unique, so the result is, too
    return vocab - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
