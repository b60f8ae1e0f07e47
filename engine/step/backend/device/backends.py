"""Makes the backend of an engine on accelerators: its buffers, its forward, and the forwards of further ranks.

Thread: device, at start. In: the ranks, whose models have their weights. Out: a DeviceBackend, which Startup prepares.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.config import EngineConfig
from engine.layers.batch import FollowedHook, LayerHook
from engine.parallel.model import SplitModel
from engine.sampling.masks import LineUpload
from engine.step.backend.device.backend import DeviceBackend, DeviceSteady
from engine.step.backend.device.buffers import StepBuffers
from engine.step.backend.device.forward import DeviceForward, DeviceMasks
from engine.step.backend.device.forwards import FollowingForward, Forwards
from engine.step.backend.host.forward import HostMasks
from engine.step.parts.pooling import DevicePooling, PooledRank
from engine.step.rank import Rank
from engine.step.sizes import Sizes
from engine.step.step import Endings


def token_backend(
    config: EngineConfig, ranks: Sequence[Rank], sizes: Sizes, hooks: Sequence[LayerHook], endings: Endings
) -> tuple[DeviceBackend, DeviceForward]:
    """Makes the backend of a model that generates tokens."""
    rank = ranks[0]
    assert rank.accelerator is not None
    has_media = len(rank.model.config.modalities) > 1 or config.enable_prompt_embeds
    buffers = StepBuffers(rank, sizes, config.deterministic, has_media, hooks, config.lora is not None)
    forward = DeviceForward(config, rank, sizes, buffers, endings)
    if isinstance(rank.model, SplitModel):
        followed = list(map(FollowedHook, hooks))
        following = [
            FollowingForward(
                each, sizes, StepBuffers(each, sizes, config.deterministic, has_media, followed, first=buffers)
            )
            for each in ranks[1:]
        ]
        forward.all = Forwards(forward, following, rank.model.group)
    upload = LineUpload(rank.accelerator, forward.sampler.allowed_table, sizes.max_lines)
    backend = DeviceBackend(config, rank, sizes, buffers, forward, DeviceMasks(upload, forward.sampler))
    if rank.accelerator.has_steady_loop:
        backend.steady = DeviceSteady(backend, forward.sampler.asked, forward.logprob_words)
    return backend, forward


def pooling_backend(
    config: EngineConfig, ranks: Sequence[Rank], sizes: Sizes, hooks: Sequence[LayerHook], endings: Endings
) -> tuple[DeviceBackend, DevicePooling]:
    """Makes the backend of a pooling model. No row samples a token, and Python launches every step."""
    rank = ranks[0]
    media, places = bool(rank.model.towers), config.lora is not None
    buffers = StepBuffers(rank, sizes, config.deterministic, media, hooks, places)
    forward = DevicePooling(rank, sizes, buffers)
    if isinstance(rank.model, SplitModel):
        following = [
            PooledRank(each, sizes, StepBuffers(each, sizes, config.deterministic, media, (), first=buffers))
            for each in ranks[1:]
        ]
        forward.all = Forwards(forward, following, rank.model.group)
    return DeviceBackend(config, rank, sizes, buffers, forward, HostMasks()), forward
