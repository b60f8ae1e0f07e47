"""Makes the backend of a rank on the CPU: slots, forward and stream; nothing is compiled, measured or recorded."""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.config import EngineConfig
from engine.layers.batch import LayerHook
from engine.step.backend.host.backend import Forward, HostBackend
from engine.step.backend.host.forward import HostForward
from engine.step.backend.host.slots import HostSlots
from engine.step.parts.pooling import HostPooling
from engine.step.rank import Rank
from engine.step.sizes import Sizes
from engine.step.step import Endings


def host_backend(
    config: EngineConfig, rank: Rank, sizes: Sizes, hooks: Sequence[LayerHook], endings: Endings
) -> HostBackend:
    """Makes the backend of a model that generates tokens or pools."""
    model = rank.model
    groups = rank.layout.token_groups
    slots = HostSlots(sizes.max_slots, sizes.max_blocks, groups, model.config.bidirectional, sizes.num_drafts)
    forward: Forward
    if model.pooler is None:
        forward = HostForward(config, rank, sizes, slots, endings)
    else:
        forward = HostPooling(model, sizes, slots)
    return HostBackend(rank, sizes, slots, forward, hooks)
