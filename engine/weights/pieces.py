"""Pieces: collects a part's tensors until all have arrived, and allocates device memory for them.

Owner: the thread that builds the model. In: each checkpoint tensor once, as a view of a file (`add`), or as device
memory (`room`) that the loader fills and then adds. Pieces that a part joins (q|k|v, gate|up) get consecutive slices
of one tensor, so that joining them costs nothing. Out: one call of `fill` for every part; `check` refuses weights that
are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.kernels.gemm.pack import Placement
from engine.weights.finite import FiniteSums
from engine.weights.heap import Heap
from engine.weights.table import Part, Place


class Pieces:
    """The arrived tensors of incomplete parts."""

    def __init__(
        self,
        places: dict[str, Place],
        saved: Mapping[str, torch.dtype],
        placement: Placement,
        sums: FiniteSums | None = None,
    ) -> None:
        """`saved`: the saved dtype of each tensor; `sums` gets each tensor that was read."""
        self._places = places
        self._saved = saved
        self._placement = placement
        self.pending: dict[Part, int] = {}  # part -> number of missing pieces
        self._arrived: dict[Part, dict[str, list[Tensor | None]]] = {}
        self._rooms: dict[str, Tensor] = {}
        self._sums = sums
        self.heap = Heap()
        self._joined: dict[tuple[Part, str], list[str]] = {}  # (part, kind) -> names of the joined pieces, in order
        for name, place in places.items():
            self.pending[place.part] = self.pending.get(place.part, 0) + 1
            self._joined.setdefault((place.part, place.kind), []).append(name)

    def room(self, name: str) -> Tensor:
        """Device memory for a tensor, in its saved dtype; returned once per tensor."""
        if name not in self._rooms:
            place = self._places[name]
            self._allocate(self._joined[place.part, place.kind])
        return self._rooms.pop(name)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor; the last tensor of a part fills the part."""
        place = self._places[name]
        part = place.part
        if self._sums is not None:
            self._sums.add(name, tensor)
        if part not in self._arrived:
            self._arrived[part] = {kind: [None] * len(shapes) for kind, shapes in part.expects().items()}
        self._arrived[part][place.kind][place.index] = tensor
        self.pending[part] -= 1
        if not self.pending[part]:
            arrived = self._arrived.pop(part)
            part.fill(arrived, self._placement)
            del self.pending[part]
            if self._placement.device == "cpu":
                self.heap.packed(sum(piece.nbytes for each in arrived.values() for piece in each if piece is not None))

    def _allocate(self, names: list[str]) -> None:
        """Allocates one tensor for all pieces with the same saved dtype, and a slice for each piece."""
        for dtype in {self._saved[name] for name in names}:
            alike = [name for name in names if self._saved[name] == dtype]
            counts = [torch.Size(self._places[name].wanted.shape).numel() for name in alike]
            whole = torch.empty(sum(counts), dtype=dtype, device=self._placement.device)  # the pieces' values, in order
            for name, piece in zip(alike, whole.split(counts)):
                self._rooms[name] = piece.view(self._places[name].wanted.shape)
