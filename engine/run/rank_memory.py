"""The bytes that each rank of a running engine holds, for the metrics. Thread: device, at the end of the start."""

from __future__ import annotations

from engine.base.limits import RankMemory
from engine.cache.layout import CacheLayout
from engine.models.base.model import Model
from engine.parallel.codes import rank_bytes
from engine.parallel.model import SplitModel
from engine.weights.load import weight_bytes


def memory_of_ranks(model: Model, layout: CacheLayout, blocks: int, claimed: int) -> tuple[RankMemory, ...]:
    """By rank; `layout`: rank 0's; `blocks`: of the KV cache, equal on all ranks; `claimed`: bytes of weights of the
    step's parts, which rank 0 has."""
    if not isinstance(model, SplitModel):
        return (RankMemory(weight_bytes(model) + claimed, blocks * layout.block_bytes, 0),)
    others = layout.of_rank(1, len(model.members)).block_bytes
    return tuple(
        RankMemory(
            rank_bytes(member, rank) + (0 if rank else claimed),
            blocks * (others if rank else layout.block_bytes),
            model.group.exchange_bytes(rank),
        )
        for rank, member in enumerate(model.members)
    )
