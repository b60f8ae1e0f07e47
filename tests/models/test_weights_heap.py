"""Memory freed by packing returns to the system while weights are read, not only at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kernels.gemm.pack import Placement
from engine.models.registry import build_model, load_model_config
from engine.weights import heap
from engine.weights.heap import Heap
from engine.weights.load import load_weights
from tests import tiny

HOLE, COUNT = 1 << 20, 96  # bytes, below the size from which glibc uses mmap after a first large piece was freed


def resident() -> int:
    """Bytes of resident anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize(("device", "least", "most"), [("cpu", 10, 1000), ("cpu:0", 0, 0)])
def test_a_cpus_loader_trims_between_parts(monkeypatch, device, least, most):
    trims = []
    monkeypatch.setattr(heap, "TRIM_AFTER", 2000)
    monkeypatch.setattr(Heap, "trim", lambda _: trims.append(1))
    model = build_model(load_model_config(tiny.checkpoint("mixtral")), torch.float32)
    load_weights(model, str(tiny.checkpoint("mixtral")), "auto", Placement(torch.float32, device))
    assert least <= len(trims) <= most


def test_holes_between_what_stays_cost_nothing_after_a_trim():
    torch.empty(8 * HOLE, dtype=torch.uint8)  # freed: from now on smaller pieces come from the heap
    kept, holes = [], []
    for _ in range(COUNT):
        holes.append(torch.ones(HOLE, dtype=torch.uint8))
        kept.append(torch.ones(4096, dtype=torch.uint8))
    before = resident()
    holes.clear()
    Heap().trim()
    assert before - resident() > HOLE * COUNT * 0.8
    assert all(len(each) for each in kept)
