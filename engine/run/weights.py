"""Reads the weights of a model and of its pooler into the memory of the model's rank.

Thread: device. On an accelerator the free memory is checked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from engine.base.config import EngineConfig
from engine.cache.sizing import check_weights
from engine.device.accelerator import Accelerator
from engine.device.memory import enough_for
from engine.kernels.gemm.pack import Placement
from engine.models.base.model import Model
from engine.parallel.codes import rank_bytes
from engine.parallel.model import SplitModel
from engine.weights.load import load_weights, weight_bytes
from engine.weights.progress import ProgressLine


def read_weights(config: EngineConfig, model: Model, accelerators: Sequence[Accelerator]) -> None:
    """Loads the weights; `accelerators`: of the ranks, none on a CPU. Raises ConfigError if one has too little free
    memory."""
    line = ProgressLine()
    if isinstance(model, SplitModel):
        for rank, (member, each) in enumerate(zip(model.members, accelerators)):
            check_weights(config, rank_bytes(member, rank), each.memory(), model.dtype)
        with enough_for("weights", accelerators[0].memory) if accelerators else nullcontext():
            placement = Placement(model.dtype, model.device, config.deterministic)
            pieces = partial(model.pieces, products=[each.products for each in accelerators])
            load_weights(model.whole, config.model, config.load_format, placement, config.seed, line, pieces)
            _read_pooler(config, model, placement)
        return
    if not accelerators:
        load_weights(model, config.model, config.load_format, None, config.seed, line)
        _read_pooler(config, model, Placement(model.dtype, model.device))
        return
    (accelerator,) = accelerators
    check_weights(config, weight_bytes(model), accelerator.memory(), model.dtype)
    with enough_for("weights", accelerator.memory):
        placement = Placement(model.dtype, model.device, config.deterministic, accelerator.products)
        load_weights(model, config.model, config.load_format, placement, config.seed, line)
        _read_pooler(config, model, placement)


def _read_pooler(config: EngineConfig, model: Model, placement: Placement) -> None:
    if model.pooler is not None:
        model.pooler.read_folders(config.model, config.load_format, placement, config.seed)
