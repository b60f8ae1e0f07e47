"""Simulated cards for tests that check which kernel is chosen: nothing is launched.

`on_card` makes this process choose kernels for a card; `tensor` has a shape, a dtype and a device, and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.explain.pretence import Pretence, PretendedTensor
from engine.kernels import pdl, target, tune

NVIDIA, AMD = ("sm_80", "sm_90", "sm_100"), ("gfx942", "gfx950", "gfx1100")
CACHED = (target.target, tune.one_row, tune.few_rows_cut, pdl.overlaps, pdl.launch_options)


@contextmanager
def on_card(name: str) -> Iterator[str]:
    """In this block, kernels are chosen for this card."""
    with pytest.MonkeyPatch.context() as patch, Pretence("cuda:0", lambda _: None):
        patch.setattr(target, "pretended", [target.CARDS[name]])
        for function in CACHED:
            function.cache_clear()
        yield name
    for function in CACHED:
        function.cache_clear()


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> PretendedTensor:
    return Pretence("cuda:0", lambda _: None).tensor(shape, dtype)
