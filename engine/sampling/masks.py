"""LineUpload: the way of a step's lines of allowed tokens to a device, through three pinned blocks.

Owner: device thread. A step's lines are written into a pinned block while its forward runs, and copied on a stream of
their own meanwhile; the compute stream waits for the copy, and writes the lines into the table of rules, which the
choice of tokens reads.

    block 0 | fill n | copy .. event |                              fill n + 3, after the event
    block 1                | fill n + 1 | copy .. event |
    compute   forward n .... | wait for the event, write, choose  | forward n + 1 ...

A block is written again only after the event of its last copy has fired. On the device a block is used again three
steps later, when the step that read it has been settled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.base.mask_lines import Lines

if TYPE_CHECKING:
    from engine.device.accelerator import Accelerator

BLOCKS = 3
SPARE_WORDS = 8  # a tokenizer may have some ids more than the model has logits


class LineUpload:
    """The blocks, and the table that they end in."""

    def __init__(self, accelerator: Accelerator, table: Tensor, max_rows: int) -> None:
        """table int32 [lines, ceil(vocab / 32)] on the device."""
        self._table, self._max_rows = table, max_rows
        self._words = table.shape[1] + SPARE_WORDS
        size = max_rows * (3 + self._words)  # by row: its line of the table, int64, its tail, its words
        self._pinned = [accelerator.pinned(size) for _ in range(BLOCKS)]
        self._device = [torch.zeros(size, dtype=torch.int32, device=table.device) for _ in range(BLOCKS)]
        self._copied = [accelerator.event() for _ in range(BLOCKS)]
        self._side = accelerator.side_stream()
        self._block = 0

    def memory(self, count: int, words: int) -> np.ndarray:
        """Where a step's lines are written, int32 [count, words]; `send` takes them."""
        assert words <= self._words, "structured output is off for such a tokenizer"
        self._block = (self._block + 1) % BLOCKS
        self._copied[self._block].synchronize()
        return self._pinned[self._block].numpy()[3 * count : (3 + words) * count].reshape(count, words)

    def send(self, lines: Lines, targets: list[int]) -> None:
        """Puts the lines of the last `memory` into these lines of the table, for work launched from now on."""
        count, words = lines.words.shape
        pinned, block = self._pinned[self._block], self._device[self._block]
        header = pinned.numpy()
        header[: 2 * count].view(np.int64)[:] = targets
        header[2 * count : 3 * count] = lines.tails
        used = (3 + words) * count
        with self._side:
            block[:used].copy_(pinned[:used], non_blocking=True)
            self._copied[self._block].record()
        self._side.join(self._copied[self._block])
        number = block[: 2 * count].view(torch.int64)
        width = min(words, self._table.shape[1])
        sent = block[3 * count : used].view(count, words)
        self._table[:, :width].index_copy_(0, number, sent[:, :width])
        if width < self._table.shape[1]:
            tail = block[2 * count : 3 * count, None].expand(count, self._table.shape[1] - width)
            self._table[:, width:].index_copy_(0, number, tail)
