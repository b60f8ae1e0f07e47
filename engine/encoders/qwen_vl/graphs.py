"""CUDA graphs of Qwen's vision tower, one per budget of patches: a picture costs one launch instead of four hundred.

Owner: device thread; recorded at start only. Items with up to BUDGETS[-1] patches in total use the graph of the
smallest budget that holds their patches, windows and frames; the unused part is computed and discarded. Larger
pictures run eagerly, because the device takes longer than the host's launches. Launches are slow while a server's
other threads run: 5,476 patches (1024 x 1024) took the device 16.1 ms as a graph, and 19.9 to 29 ms launched singly.

    patches, tables --copied--> fixed buffers --graph--> fixed rows --copied--> each item's own rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.encoders.qwen_vl.config import VisionConfig
from engine.encoders.qwen_vl.tables import GridTables, Room, head_half, taps_of, window_side
from engine.encoders.tower import Record
from engine.kernels.attention.dense import SHORT_MEAN

BUDGETS = (  # patches
    384, 640, 1024, 1344, 1664, 2048, 2560, 3072, 3328, 3584, 3840, 4096, 4480, 4864, 5184, 5504, 5888, 6272, 6912,
    7424, 8192,
)  # fmt: skip
Compute = Callable[[Tensor, GridTables], Tensor]


class TowerGraphs:
    """The fixed buffers, and the functions that replay the graphs."""

    def __init__(
        self,
        config: VisionConfig,
        numbers: int,
        compute: Compute,
        dtype: torch.dtype,
        device: str,
        budgets: tuple[int, ...] = BUDGETS,
    ) -> None:
        """`numbers`: values per patch. `compute`: patches and tables of a room -> rows [blocks, row_width *
        row_parts]."""
        self._config = config
        self._compute = compute
        self._rooms = [self._room(budget) for budget in sorted(budgets)]
        largest = self._rooms[-1]
        self.patches = torch.zeros(largest.patches, numbers, dtype=dtype, device=device)
        self._rows = torch.zeros(largest.blocks, config.row_width * config.row_parts, dtype=dtype, device=device)
        self.flat = torch.zeros(largest.numbers, dtype=torch.int32, device=device)
        self.may_replay: Callable[[], bool] = lambda: True  # False: the current item has an adapter
        self._replays: dict[int, Callable[[], None]] = {}
        self._used = 0  # lines of `patches` that are not zero
        self._tables: GridTables | None = None  # the tables that `flat` holds

    def _room(self, patches: int) -> Room:
        unit = self._config.merge_size**2
        frames = (patches - 1) // SHORT_MEAN  # more frames would need the kernel for short segments
        windows = max(patches // (window_side(self._config) * unit), frames)  # worst case: windows one block high
        window = window_side(self._config) ** 2 * unit
        return Room(
            patches, windows, frames, window, unit, head_half(self._config), taps_of(self._config), graphed=True
        )

    def room(self, patches: int, windows: int, frames: int) -> Room | None:
        """The smallest room that has a graph and holds the patches, windows and frames; None: there is none."""
        rooms = (room for room in self._rooms if room.holds(patches, windows, frames))
        return next((room for room in rooms if room.patches in self._replays), None)

    def record(self, record: Record) -> None:
        """Records the graphs, largest first, so that the smaller graphs fit into the same memory."""
        for room in reversed(self._rooms):
            self._replays[room.patches] = record(partial(self._fill, room))

    def _fill(self, room: Room) -> None:
        tables = GridTables(self.flat[: room.numbers], room)
        self._rows[: room.blocks] = self._compute(self.patches[: room.patches], tables)

    def run(self, items: Sequence[Tensor], tables: GridTables) -> Tensor:
        """Patches [n, numbers] of each item, as many as in the tables -> rows [sum of n / unit, row_width * row_parts].

        The next run overwrites the returned rows: callers copy the rows that they need longer.
        """
        room, count = tables.room, 0
        for patches in items:
            self.patches[count : count + len(patches)] = patches
            count += len(patches)
        if count < self._used:
            self.patches[count : self._used] = 0
        self._used = count
        if tables is not self._tables:  # pictures of one size often follow each other: saves a copy
            self.flat[: room.numbers] = tables.flat
            self._tables = tables
        if self.may_replay():
            self._replays[room.patches]()
        else:
            self._fill(room)
        return self._rows[: count // room.unit]
