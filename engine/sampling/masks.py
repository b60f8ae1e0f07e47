"""LineUpload: copies a step's masks of allowed tokens to a device, through three pinned blocks.

Owner: device thread. While a step's forward runs, its masks are written into a pinned block and copied on a side
stream. The compute stream waits for the copy and writes the masks into the table of rules, which sampling reads.

    block 0 | fill n | copy .. event |                              fill n + 3, after the event
    block 1                | fill n + 1 | copy .. event |
    compute   forward n .... | wait for the event, write, choose  | forward n + 1 ...

A pinned block is rewritten only after the event of its last copy has fired. A device block is reused three steps
later, when the step that read it has been settled.
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
SPARE_WORDS = 8  # a tokenizer may have more ids than the model has logits


class LineUpload:
    """The blocks, and the table that the masks are copied to."""

    def __init__(self, accelerator: Accelerator, table: Tensor, most: int) -> None:
        """table int32 [lines, ceil(vocab / 32)] on the device; most: masks of a step."""
        self._table = table
        self._words = table.shape[1] + SPARE_WORDS
        size = most * (3 + self._words)  # per mask: line of the table (int64), tail, words
        self._pinned = [accelerator.pinned(size) for _ in range(BLOCKS)]
        self._device = [torch.zeros(size, dtype=torch.int32, device=table.device) for _ in range(BLOCKS)]
        self._copied = [accelerator.event() for _ in range(BLOCKS)]
        self._side = accelerator.side_stream()
        self._block = 0

    def memory(self, count: int, words: int) -> np.ndarray:
        """The buffer for a step's masks, int32 [count, words], which `send` copies."""
        assert words <= self._words, "structured output is off for such a tokenizer"
        self._block = (self._block + 1) % BLOCKS
        self._copied[self._block].synchronize()
        return self._pinned[self._block].numpy()[3 * count : (3 + words) * count].reshape(count, words)

    def send(self, lines: Lines, targets: list[int]) -> None:
        """Copies the masks of the last `memory` to lines `targets` of the table, for work launched from now on."""
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
