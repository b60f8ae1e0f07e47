"""Forms of states for --deterministic on an accelerator: bases are where chunks of a scan begin."""

from __future__ import annotations

import pytest
import torch

from engine.base.config import StateConfig
from engine.cache.layout import CacheLayout
from engine.kernels.state.delta_prepare import SIZE as DELTA_SIZE
from engine.kernels.state.ssd_scan import SIZE as SSD_SIZE
from engine.layers.state import StateMixer
from engine.layers.states import set_states
from engine.models.registry import build_model, load_model_config
from tests import tiny


def form_of(name: str, on_host: bool, exact: bool, drafts: int = 0) -> tuple[int, int, bool]:
    """Positions of a fold and of a tail, and whether the layers are exact; from the layout that they make."""
    model = build_model(load_model_config(tiny.checkpoint(name)), torch.float32, "cpu", None)
    set_states(model, StateConfig(), on_host, drafts, exact)
    mixers = [each for layer in model.layers for each in layer.mixers if isinstance(each, StateMixer)]
    runs = CacheLayout(model.cache_specs(), 16).runs
    (exacts,), (ring,) = {each.shape.exact for each in mixers}, {group.spec.ring for group in runs.groups}
    return runs.chunk, ring, exacts


def test_a_base_begins_a_chunk_of_both_scans():
    assert form_of("qwen3_5_text-states", False, True) == (DELTA_SIZE, DELTA_SIZE + 2, True)
    assert form_of("mamba2", False, True, drafts=3) == (SSD_SIZE, SSD_SIZE + 11, True)


@pytest.mark.parametrize(("name", "on_host", "exact"), [("jamba-states", False, True), ("mamba2", False, False)])
def test_other_layers_fold_as_always(name, on_host, exact):
    """Mamba-1 replays every position of its tail, so a longer tail would take longer."""
    assert form_of(name, on_host, exact) == (16, 18, exact)


def test_a_cpu_folds_each_token():
    assert form_of("mamba2", True, True) == (1, 3, False)
