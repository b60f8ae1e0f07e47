"""Orders of rows: from the order in which a checkpoint keeps queries and keys to the order in which kernels read them.

In: the rows of a weight [heads * head_dim, hidden], of a bias or of a norm [heads * head_dim]. Out: copies. Scores stay
the same when the dimensions of queries and of keys change places alike, so a kernel needs to know one order of rotated
pairs only. Thread: any.
"""

from __future__ import annotations

import torch
from torch import Tensor


def half_split(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Of the first `rotary_dim` rows of each head the even rows, then the odd rows, then the rest of the head.

    file:   a0 b0 a1 b1 a2 b2 ... rest   ->   a0 a1 a2 ... b0 b1 b2 ... rest
    """
    heads = rows.unflatten(0, (-1, head_dim))
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    return heads[:, order].flatten(0, 1)


def queries_keys_values(rows: Tensor, queries: int, head_dim: int) -> Tensor:
    """From the rows of each key-value head's queries, key and value to all queries, then all keys, then all values."""
    heads = rows.unflatten(0, (-1, queries + 2, head_dim))
    return torch.cat([heads[:, :queries].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)])
