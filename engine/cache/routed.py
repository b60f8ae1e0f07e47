"""RoutedIds: the experts that each token in the KV cache chose, kept beside its blocks.

Owner: device thread; written by the layers of steps, in step order. A token's place is that of its keys and values in a
group of layers that see every token. So blocks that the prefix cache finds again bring the experts of their tokens
along, and a row that was preempted writes its own again. In: the slot mapping of a step. Out: when a traced row's slot
comes back, the experts of all its tokens, read through its block table before any later step may take its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.cache.layout import CacheLayout
from engine.cache.spec import KIND_FULL, CacheSpec
from engine.kernels.moe.kept import Kept

if TYPE_CHECKING:
    from engine.device.accelerator import Accelerator

CHUNK = 128  # blocks that are gathered at a time


def routed_shape(text: TextConfig) -> tuple[int, int, torch.dtype]:
    """(layers with experts, experts of a token, dtype of their numbers); without experts (0, 0, uint8)."""
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


def routed_bytes(text: TextConfig, specs: Sequence[CacheSpec]) -> int:
    """What a token's experts take; ConfigError where no layer sees every token."""
    layers, top_k, dtype = routed_shape(text)
    if layers and not any(spec.kind == KIND_FULL for spec in specs):
        raise ConfigError(
            "--enable-return-routed-experts: every layer of this model has a sliding window, so the experts of older "
            "tokens are gone, like their blocks, before an answer ends; leave the flag out"
        )
    return layers * top_k * dtype.itemsize


class RoutedIds:
    """[places, layers, top_k]: a place for every token of the cache."""

    def __init__(self, text: TextConfig, layout: CacheLayout, accelerator: Accelerator | None = None) -> None:
        self._layers, self._top_k, self._dtype = routed_shape(text)
        self._block_size = layout.block_size
        # The first group whose layers see every token: its block tables and slot mapping say where a token is.
        self.group = next(number for number, group in enumerate(layout.groups) if group.spec.kind == KIND_FULL)
        self._accelerator = accelerator
        self._blocks: Tensor  # [num_blocks, block_size, layers, top_k]
        if accelerator is not None:  # what the gathering of CHUNK blocks passes through
            shape = (CHUNK, self._block_size, self._layers, self._top_k)
            self._gathered = torch.empty(shape, dtype=self._dtype, device=accelerator.device)
            words = -(-self._gathered.nbytes // 4)
            self._home = accelerator.pinned(words).view(self._dtype)[: self._gathered.numel()].view(shape)
            self._side, self._done = accelerator.side_stream(), accelerator.event()

    def allocate(self, num_blocks: int) -> None:
        """Places for so many blocks."""
        device = "cpu" if self._accelerator is None else self._accelerator.device
        shape = (num_blocks, self._block_size, self._layers, self._top_k)
        self._blocks = torch.zeros(shape, dtype=self._dtype, device=device)
        if self._accelerator is not None:
            with self._side:  # which reads it, and waits for no other stream
                table = torch.zeros(1, dtype=torch.int32, device=device)
            self.read(table, 1)  # nothing is met for the first time later

    def of_step(self, mapping: Tensor) -> Kept:
        """Where the tokens of a step go whose slot mapping in this group is `mapping`."""
        return Kept(self._blocks.flatten(0, 1), mapping)

    def read(self, table: Tensor, length: int) -> np.ndarray:
        """The experts of the first `length` tokens of a block table, [length, layers, top_k]; waits for the copy.

        On an accelerator beside the step in flight, which was planned before the blocks were free.
        """
        table = table[: -(-length // self._block_size)]
        if self._accelerator is None:
            return self._blocks.index_select(0, table).flatten(0, 1)[:length].numpy()
        parts = []
        with self._side:
            for first in range(0, len(table), CHUNK):
                blocks = table[first : first + CHUNK]
                gathered, home = self._gathered[: len(blocks)], self._home[: len(blocks)]
                torch.index_select(self._blocks, 0, blocks, out=gathered)
                home.copy_(gathered, non_blocking=True)
                self._done.record()
                self._done.synchronize()
                parts.append(home.flatten(0, 1).numpy().copy())
        return np.concatenate(parts)[:length]


def routed_ids(
    enabled: bool, text: TextConfig, layout: CacheLayout, accelerator: Accelerator | None = None
) -> RoutedIds | None:
    """None where they are not kept, or no layer has experts."""
    return RoutedIds(text, layout, accelerator) if enabled and routed_shape(text)[0] else None
