"""LentBlocks: pinned memory that decoded pictures are written into, so that the device copies from where they lie.

Whoever decodes asks from its own thread (`lend`); the device thread launches copies (`send`). A block is lent again
only when the last array over it is gone, which Python tells, and when the copy that was launched last has run, which
its event tells: an array outlives the launch of its copies, so the two are asked in that order. Pinned memory is
scarce: who keeps pixels moves them out (mm/decode/spare), and who finds no block uses memory of its own, which goes
through the UploadRing.

    pool     lend | decode, copy into it |        moved out, array gone |      lent again when the event has fired
    device                               | send: copy ............ event |
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.device import Accelerator

SMALLEST = 128 << 10  # bytes; less is copied twice in no time
LARGEST, BLOCKS = 16 << 20, 4


class LentBlocks:
    """Few blocks of one size, taken once, at start."""

    def __init__(self, accelerator: Accelerator, block_bytes: int = LARGEST, blocks: int = BLOCKS) -> None:
        self._blocks = [accelerator.pinned(block_bytes // 4).view(torch.uint8) for _ in range(blocks)]
        self._copied = [accelerator.event() for _ in range(blocks)]
        self._at = {block.data_ptr(): number for number, block in enumerate(self._blocks)}
        self._back = deque(range(blocks))  # no array lies there; appended where the last one dies, on any thread
        self._largest = block_bytes

    def lend(self, size: int) -> np.ndarray | None:
        """uint8 [size] for nobody else, not cleared; None where there is none of this size now (any thread)."""
        if not SMALLEST <= size <= self._largest:
            return None
        for _ in range(len(self._back)):
            try:
                number = self._back.popleft()
            except IndexError:  # others were faster
                return None
            if self._has_been_copied(number):
                room: np.ndarray = self._blocks[number][:size].numpy()
                weakref.finalize(room, self._back.append, number).atexit = False
                return room
            self._back.append(number)
        return None

    @property
    def num_lent(self) -> int:
        """Blocks over which there is an array (any thread)."""
        return len(self._blocks) - len(self._back)

    def _has_been_copied(self, number: int) -> bool:
        try:
            return bool(self._copied[number].query())
        except RuntimeError:  # a lost device copies nothing any more; the device thread hears of it
            return False

    def send(self, source: np.ndarray, target: Tensor) -> bool:
        """Launches the copy of a lent array, uint8 [size]; False where the array is none of ours (device thread)."""
        number = self._at.get(source.__array_interface__["data"][0])
        if number is None:
            return False
        target.copy_(self._blocks[number][: len(source)], non_blocking=True)
        self._copied[number].record()
        return True
