"""Shares: what each rank of an engine will hold, from the model's configuration alone.

Thread: any; nothing is allocated. `check` asks for it (estimate.py); the start measures instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.base.config import EngineConfig
from engine.base.model_config import ModelConfig
from engine.device.cards import cards_of, check_cards
from engine.device.memory import DeviceMemory, device_memory
from engine.models.base.model import Model
from engine.models.registry import build_model
from engine.parallel.codes import rank_bytes
from engine.parallel.device import room_bytes
from engine.parallel.model import SplitModel
from engine.parallel.slices import check_dealt, check_experts
from engine.run.built import needs_of
from engine.step.sizes import Sizes
from engine.weights.files import Shard, TensorInfo
from engine.weights.load import weight_bytes
from engine.weights.table import expand


@dataclass(frozen=True, slots=True)
class Shares:
    """The model as the engine will run it, and what each rank holds."""

    model: Model
    config: ModelConfig  # of rank 0's part
    weights: tuple[int, ...]  # bytes by rank
    memories: tuple[DeviceMemory, ...]  # of the ranks' devices, without the memory of exchanges; empty on a CPU


def shares_of(
    config: EngineConfig,
    model: Model,
    sizes: Sizes,
    device: str,
    shards: list[Shard] | None,
    names: Mapping[str, str],
) -> Shares:
    """The shares of the ranks of a model; `names`: from `match`. Raises ConfigError if the start would raise it."""
    ranks = config.tensor_parallel
    check_experts(model.config, config)
    if ranks == 1:
        mapped = shards and device == "cpu" and model.config.implementation == "native"
        mapped = mapped and not any(shard.gguf for shard in shards or ())  # GGUF codes are widened during reading
        weights = host_bytes(shards, names, model) if shards and mapped else weight_bytes(model)
        return Shares(model, model.config, (weights,), () if device == "cpu" else (device_memory(device),))
    check_dealt(model.config, config)
    memories = []
    if device != "cpu":
        check_cards(ranks, cards_of(ranks), config.ranks.driver_variables, config.ranks.require_peer_access)
        rooms = room_bytes(ranks, needs_of(model.config, sizes, model.dtype, ranks))
        for rank in range(ranks):
            now = device_memory(f"cuda:{rank}")
            memories.append(replace(now, free=now.free - rooms))
    split = SplitModel(
        model,
        lambda sliced, _rank: build_model(sliced, model.dtype, "cpu", shards),
        ranks,
        whole_experts=config.ranks.whole_experts,
    )
    held = tuple(map(rank_bytes, split.members, range(ranks)))
    return Shares(split, split.members[0].config, held, tuple(memories))


def host_bytes(shards: list[Shard], names: Mapping[str, str], model: Model) -> int:
    """Bytes of weights on a CPU: bfloat16 and codes keep their size (engine/quant/base.py); `names`: from `match`."""
    places = expand(model.weight_table(), model)

    def taken(info: TensorInfo, in_memory: torch.dtype | None) -> int:
        widened = in_memory or (model.dtype if info.dtype in ("F32", "F16") else None)
        return info.num_bytes if widened is None else math.prod(info.shape) * widened.itemsize

    tensors = {names[name]: info for shard in shards for name, info in shard.tensors.items() if name in names}
    return sum(taken(info, places[name].wanted.in_memory) for name, info in tensors.items())
