"""Rank: one device of an engine, with all of the engine's objects on this device. Most engines have a list of one Rank.

Owner: device thread, from the start on. Contexts, streams, graphs, buffers, weights and caches belong to a rank; no
module has a global device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.cache.layout import CacheLayout
from engine.cache.spec import LayerCache
from engine.device.accelerator import Accelerator
from engine.models.base.model import Model
from engine.parallel.model import SplitModel


@dataclass(slots=True)
class Rank:
    """One device with its model, caches and accelerator."""

    number: int  # index in the engine's list
    model: Model  # of the engine; its calls compute on all ranks
    layout: CacheLayout
    accelerator: Accelerator | None = None  # context, streams, graphs; None: the rank uses the CPU
    caches: list[LayerCache] = field(default_factory=list)  # one per layer with a cache; set by `allocate`
    num_blocks: int = 1  # blocks of the caches with the dummy block

    @property
    def device(self) -> torch.device | str:
        """The device as torch names it."""
        return "cpu" if self.accelerator is None else self.accelerator.device

    @property
    def on_host(self) -> bool:
        """True if the rank computes on the CPU."""
        return self.accelerator is None

    @property
    def own(self) -> Model:
        """The rank's slice of the model; if there is one rank, the model."""
        return self.model.members[self.number] if isinstance(self.model, SplitModel) else self.model

    def allocate(self, blocks: int, poison: bool) -> None:
        """Allocates the KV cache; `blocks` includes the dummy block."""
        self.num_blocks = blocks
        self.caches = self.layout.allocate(blocks, poison, self.device)
