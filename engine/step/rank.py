"""Rank: one device of an engine, with everything of the engine that lies there. An engine has a list of them, of one.

Owner: device thread, from the start on. Nothing outside of a rank holds a context, a stream, a graph, a buffer, weights
or caches, and no module has a device of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.cache.layout import CacheLayout
from engine.cache.spec import LayerCache
from engine.device.accelerator import Accelerator
from engine.models.base.model import Model


@dataclass(slots=True)
class Rank:
    """Place `number` of the list."""

    number: int
    model: Model  # the weights that lie here
    layout: CacheLayout
    accelerator: Accelerator | None = None  # context, streams, graphs; None: the host's memory and threads
    caches: list[LayerCache] = field(default_factory=list)  # by layer that keeps something; set when sized
    num_blocks: int = 1  # of the caches, the dummy one among them

    @property
    def device(self) -> torch.device | str:
        """As torch names it."""
        return "cpu" if self.accelerator is None else self.accelerator.device

    @property
    def on_host(self) -> bool:
        """The rank computes on the CPU."""
        return self.accelerator is None

    def allocate(self, blocks: int, poison: bool) -> None:
        """The KV cache of so many blocks, the dummy block among them."""
        self.num_blocks = blocks
        self.caches = self.layout.allocate(blocks, poison, self.device)
