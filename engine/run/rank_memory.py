"""The bytes that each rank of a running engine holds, for the metrics. Thread: device, at the end of the start."""

from __future__ import annotations

from engine.base.limits import RankMemory
from engine.models.base.model import Model
from engine.parallel.codes import rank_bytes
from engine.parallel.model import SplitModel
from engine.weights.load import weight_bytes


def memory_of_ranks(model: Model, cache_bytes: int) -> tuple[RankMemory, ...]:
    """By rank; `cache_bytes`: of the KV cache, which has the same blocks on every rank."""
    if not isinstance(model, SplitModel):
        return (RankMemory(weight_bytes(model), cache_bytes, 0),)
    return tuple(
        RankMemory(rank_bytes(member, rank), cache_bytes, model.group.exchange_bytes(rank))
        for rank, member in enumerate(model.members)
    )
