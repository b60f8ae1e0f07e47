"""Models on simulated ranks for tests: with weights, and with caches for tests.models.harness."""

from __future__ import annotations

import functools
from copy import deepcopy
from pathlib import Path

from engine import EngineConfig
from engine.base.config import RanksConfig
from engine.checkpoint.config import resolve_dtype
from engine.models.registry import build_model, load_model_config
from engine.parallel.model import SplitModel
from engine.parallel.slices import check_dealt
from engine.quant.online import requested
from engine.weights.files import open_checkpoint
from engine.weights.load import load_weights
from tests.models.harness import Harness


def split(
    folder: Path,
    ranks: int,
    load_format: str = "auto",
    dtype: str = "auto",
    whole_experts: bool = False,
    quantization: str = "",
) -> SplitModel:
    """The checkpoint's model on so many ranks, loaded as at a start."""
    config = requested(load_model_config(folder), quantization)
    asked = EngineConfig(model=str(folder), tensor_parallel=ranks, ranks=RanksConfig(whole_experts))
    check_dealt(config, asked)
    build = functools.partial(build_model, dtype=resolve_dtype(config, dtype, "cpu"), shards=open_checkpoint(folder))
    model = SplitModel(build(config), lambda config, _rank: build(config), ranks, whole_experts=whole_experts)
    load_weights(model.whole, str(folder), load_format, pieces_of=model.pieces)
    return model


def harness(model: SplitModel) -> Harness:
    """A harness whose caches are rank 0's; the other ranks get copies."""
    made = Harness(model)
    model.caches = [deepcopy(made.caches) for _ in model.members[1:]]
    return made
