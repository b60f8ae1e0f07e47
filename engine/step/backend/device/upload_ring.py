"""UploadRing: copies host arrays to the device through a few pinned blocks that are allocated once at start.

Owner: device thread; the copies run in order on its current stream. A copy reads its source when it runs, not when it
is launched, so a block is written again only after the event of its last copy has fired.

    block 0 | item 1 | item 2 | 3 .. event |                            item 7 when the event has fired ...
    block 1                           | .. item 3 | item 4 | ... event |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.device.accelerator import Accelerator

BLOCK_BYTES, BLOCKS = 4 << 20, 8  # a decoded picture of 1024 x 1024 has 3 MiB
ALIGNED = 256  # bytes: the alignment of arrays on the device


class UploadRing:
    """Pinned staging memory for inputs of towers; items larger than a block are copied in pieces."""

    def __init__(self, accelerator: Accelerator, block_bytes: int = BLOCK_BYTES, blocks: int = BLOCKS) -> None:
        self._device = accelerator.device
        self._blocks = [accelerator.pinned(block_bytes // 4).view(torch.uint8) for _ in range(blocks)]
        self._copied = [accelerator.event() for _ in range(blocks)]
        self._block = 0
        self._used = 0  # bytes of the current block

    def put(self, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """Copies arrays to the device; work that is launched after this call can read the results."""
        starts, total = {}, 0
        for name, array in arrays.items():
            starts[name] = total
            total += -(-array.nbytes // ALIGNED) * ALIGNED
        room = torch.empty(total, dtype=torch.uint8, device=self._device)
        found = {}
        for name, array in arrays.items():
            whole = np.ascontiguousarray(array)
            target = room[starts[name] : starts[name] + whole.nbytes]
            self._send(whole.reshape(-1).view(np.uint8), target)
            kind = torch.from_numpy(np.empty(0, whole.dtype)).dtype
            found[name] = target.view(kind).view(whole.shape)
        return found

    def _send(self, source: np.ndarray, target: Tensor) -> None:
        done = 0
        while done < len(source):
            block = self._blocks[self._block]
            if self._used == len(block):
                self._block = (self._block + 1) % len(self._blocks)
                self._copied[self._block].synchronize()
                self._used, block = 0, self._blocks[self._block]
            count = min(len(source) - done, len(block) - self._used)
            piece = block[self._used : self._used + count]
            np.copyto(piece.numpy(), source[done : done + count])  # releases the GIL
            target[done : done + count].copy_(piece, non_blocking=True)
            self._copied[self._block].record()
            self._used += count
            done += count
