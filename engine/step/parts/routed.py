"""The return_routed_experts part: stores the expert ids of each token in the KV cache with the token's block.

Owner: device thread; the layers of steps write the ids in step order (LayerHook). A token's ids have the same block and
offset as its keys and values in a cache group with full attention. So blocks from the prefix cache contain the ids of
their tokens, and a preempted row writes its ids again. When the slot of a traced row is freed, the ids of all its
tokens are read through its block table, before a later step may reuse the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from _fast.scheduler import Scheduler
from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.base.request import Request
from engine.cache.spec import CacheSpec, LayerCache
from engine.device.accelerator import Accelerator
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.moe.capture import Capture
from engine.layers.batch import Batch, LayerHook
from engine.layers.stream import Stream
from engine.models.base.model import Model
from engine.step.backend.base import Backend
from engine.step.live import LiveRow, Place
from engine.step.parts.part import Claim, StepPart, Steps

CHUNK = 128  # blocks that are gathered at the same time


def routed_shape(text: TextConfig) -> tuple[int, int, torch.dtype]:
    """(layers with experts, experts per token, dtype of expert ids); without experts (0, 0, uint8)."""
    routings = text.routings
    if not routings:
        return 0, 0, torch.uint8
    widths = {routing.top_k for routing in routings}
    if len(widths) > 1:
        raise ConfigError(
            f"--enable-return-routed-experts: tokens choose {sorted(widths)} experts by layer; an answer's array has "
            "one width: leave the flag out"
        )
    most = max(routing.num_experts for routing in routings)
    return len(routings), widths.pop(), torch.uint8 if most <= 256 else torch.int16


class RoutedExperts(StepPart):
    """Stores the expert ids of every token in the cache, [num_blocks * block_size, layers, top_k]."""

    name = "routed_experts"

    def __init__(self, model: Model, specs: Sequence[CacheSpec]) -> None:
        self._layers, self._top_k, self._dtype = routed_shape(model.config.text)
        self._sees_all = any(spec.kind.lasts for spec in specs)
        self._backend: Backend
        self._group: int  # the first cache group with full attention; its block tables locate the tokens
        self._block_size: int
        self._blocks: Tensor  # [num_blocks, block_size, layers, top_k]
        self._gather: Gather | None = None

    def claim(self) -> Claim:
        if not self._sees_all:
            raise ConfigError(
                "--enable-return-routed-experts: every layer of this model has a sliding window, so the experts of "
                "older tokens are gone, like their blocks, before an answer ends; leave the flag out"
            )
        return Claim(token_bytes=self._layers * self._top_k * self._dtype.itemsize)

    def start(self, steps: Steps) -> None:
        self._backend = steps.backend
        rank = steps.backend.rank
        self._block_size = rank.layout.block_size
        self._group = next(number for number, group in enumerate(rank.layout.groups) if group.spec.kind.lasts)
        if rank.accelerator is not None:
            shape = (CHUNK, self._block_size, self._layers, self._top_k)
            self._gather = Gather(rank.accelerator, shape, self._dtype)

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        shape = (num_blocks, self._block_size, self._layers, self._top_k)
        self._blocks = torch.zeros(shape, dtype=self._dtype, device=self._backend.rank.device)
        if self._gather is not None:
            self._gather.warm_up(self._blocks)

    def layer_hook(self) -> LayerHook | None:
        return RoutedHook(self)

    def places(self, batch: Batch) -> Capture:
        """The buffer and the positions in it to which the tokens of a batch write their expert ids."""
        return Capture(self._blocks.flatten(0, 1), batch.attention[self._group].slot_mapping)

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        place.traced |= request.sampling.return_routed_experts

    def leave(self, slot: int, row: LiveRow, length: int) -> np.ndarray | None:
        """The expert ids of the row's tokens, [length, layers, top_k]; waits for the copy."""
        if not row.request.sampling.return_routed_experts:
            return None
        table = self._backend.block_table(self._group, slot)[: -(-length // self._block_size)]
        if self._gather is not None:
            return self._gather.read(self._blocks, table)[:length]
        return self._blocks.index_select(0, table).flatten(0, 1)[:length].numpy()


class RoutedHook:
    """Passes the buffer to the layers of a forward, whose routers write the expert ids."""

    passes, whole = 0, True

    def __init__(self, part: RoutedExperts) -> None:
        self._part = part

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        """Is not called: there are no passes."""

    def begin(self, batch: Batch, rows: DraftedRows | None) -> None:
        batch.routed = self._part.places(batch)

    def after_layer(self, number: int, x: Stream) -> None:
        """Does nothing: the router of the layer has written the ids."""


class Gather:
    """Copies blocks from an accelerator to the host, CHUNK blocks at a time, on a separate stream.

    The step in flight was planned before the blocks were freed, so it does not write them.
    """

    def __init__(self, accelerator: Accelerator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._gathered = torch.empty(shape, dtype=dtype, device=accelerator.device)
        words = -(-self._gathered.nbytes // 4)
        self._home = accelerator.pinned(words).view(dtype)[: self._gathered.numel()].view(shape)
        self._side, self._done = accelerator.side_stream(), accelerator.event()

    def warm_up(self, blocks: Tensor) -> None:
        """Reads one block, so that later reads compile and allocate nothing."""
        with self._side:  # this stream reads the table and waits for no other stream
            table = torch.zeros(1, dtype=torch.int32, device=blocks.device)
        self.read(blocks, table)

    def read(self, blocks: Tensor, table: Tensor) -> np.ndarray:
        """The expert ids of all tokens in the blocks of a table, [len(table) * block_size, layers, top_k]."""
        parts = []
        with self._side:
            for first in range(0, len(table), CHUNK):
                named = table[first : first + CHUNK]
                gathered, home = self._gathered[: len(named)], self._home[: len(named)]
                torch.index_select(blocks, 0, named, out=gathered)
                home.copy_(gathered, non_blocking=True)
                self._done.record()
                self._done.synchronize()
                parts.append(home.flatten(0, 1).numpy().copy())
        return np.concatenate(parts)
