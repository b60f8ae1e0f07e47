"""Reorders rows of queries and keys from the checkpoint's order to the kernels' order.

In: the rows of a weight [heads * head_dim, hidden], of a bias or of a norm [heads * head_dim]. Out: copies. Scores do
not change if the dimensions of queries and keys are permuted equally, so kernels support only one order of rotated
pairs. Thread: any.
"""

from __future__ import annotations

import torch
from torch import Tensor


def half_split(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """In each head: the even rows of the first `rotary_dim` rows, then the odd rows, then the rest of the head.

    file:   a0 b0 a1 b1 a2 b2 ... rest   ->   a0 a1 a2 ... b0 b1 b2 ... rest
    """
    heads = rows.unflatten(0, (-1, head_dim))
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    return heads[:, order].flatten(0, 1)


def gates_queries(rows: Tensor, head_dim: int) -> Tensor:
    """From the rows of each head's query and gate to the gates of all heads, then their queries."""
    heads = rows.unflatten(0, (-1, 2, head_dim))
    return torch.cat([heads[:, 1].flatten(0, 1), heads[:, 0].flatten(0, 1)])


def queries_keys_values(rows: Tensor, queries: int, head_dim: int) -> Tensor:
    """[queries, key, value] per key-value head -> all queries, then all keys, then all values."""
    heads = rows.unflatten(0, (-1, queries + 2, head_dim))
    return torch.cat([heads[:, :queries].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)])
