"""A cache whose blocks hold the keys and values of several layers contiguously, for tests of block strides."""

from __future__ import annotations

import torch
from torch import Tensor

LAYERS = 3


def in_one_run(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views with the given numbers, and the whole memory, in which the other layers are NaN."""
    blocks, *block = keys.shape
    run = torch.full((blocks, LAYERS, 2, *block), float("nan"), dtype=keys.dtype, device=keys.device)
    run[:, 1, 0], run[:, 1, 1] = keys, values
    assert not run[:, 1, 0].is_contiguous()
    return run[:, 1, 0], run[:, 1, 1], run[:, ::2]
