"""Fixtures for the CPU kernels: each instruction set of this machine, and a thread pool that is restored afterwards."""

from __future__ import annotations

import pytest
import torch

from _fast import cpu

LEVELS = {"plain": 0, "avx2": 1, "avx512": 2}


@pytest.fixture(params=list(LEVELS))
def isa(request):
    """Runs a test once per instruction set (a file requests it by usefixtures); skips missing instruction sets."""
    level = LEVELS[request.param]
    if cpu.limit_isa(level) != level:
        cpu.limit_isa(2)
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    cpu.limit_isa(2)


@pytest.fixture(autouse=True)
def quiet_torch():
    """One torch thread and a fixed seed: the references are small, and the cores are for the pool under test."""
    before, threads = torch.get_num_threads(), cpu.num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
    cpu.set_num_threads(threads)
