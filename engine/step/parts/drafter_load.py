"""Loads a drafter's weights, and makes its way to choose drafts. Thread: device, at start; then the stream.

Users: engine/step/parts/drafter, engine/step/parts/draft_model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from engine.base.config import EngineConfig
from engine.base.drafts import DraftConfig
from engine.device.memory import enough_for
from engine.kernels.gemm.pack import Placement
from engine.models.drafters.small_head import HeadCopy
from engine.step.backend.base import StepSampler
from engine.step.rank import Rank
from engine.weights.load import load_weights
from engine.weights.table import Weighted

Guess = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # StepSampler.guess


def load_drafter(drafter: Weighted, config: EngineConfig, rank: Rank, copy: HeadCopy | None = None) -> None:
    """Reads a drafter's weights from its folder into the rank's memory, or draws them; then the copy of the target's
    head, if it drafts with one. Raises ConfigError if the memory is too small."""
    placement = None
    room: AbstractContextManager[None] = nullcontext()
    if (found := rank.accelerator) is not None:
        placement = Placement(drafter.dtype, drafter.device, False, found.products)
        room = enough_for("drafter", found.memory)
    with room, torch.inference_mode():
        load_weights(drafter, drafter.config.folder, config.load_format, placement, config.seed)
        if copy is not None:
            copy.load(config.load_format, placement, config.seed)


def guess_of(drafts: DraftConfig, sampler: StepSampler) -> Guess:
    """How a draft follows from logits; both ways have the arguments of StepSampler.guess."""

    def most_probable(logits: Tensor, slots: Tensor, run: Tensor, place: Tensor) -> Tensor:
        padding = len(slots) * (drafts.num_tokens + 2)
        found = slots.new_full((padding + 1,), -1)
        return found.scatter_(0, run.long().where(run >= 0, padding), logits.argmax(-1).int())

    return most_probable if drafts.greedy else sampler.guess
