"""Pieces: collects a part's tensors until it has all of them, and hands out room for them where they will stay.

Owner: the thread that builds the model. In: each checkpoint tensor once, as a view of a file (`add`), or as room on the
device (`room`) that the loader fills before it is added. Pieces that a part joins (q|k|v, gate|up) get slices of one
tensor, one after the other, so that joining them costs nothing. Out: `fill` of every part, once; `check`
refuses weights that are not finite.
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
    """What has arrived of each part that is not complete."""

    def __init__(
        self,
        places: dict[str, Place],
        saved: Mapping[str, torch.dtype],
        placement: Placement,
        sums: FiniteSums | None = None,
    ) -> None:
        """`saved`: the dtype of each tensor as it comes; `sums` get each tensor that was read."""
        self._places = places
        self._saved = saved
        self._placement = placement
        self.pending: dict[Part, int] = {}  # pieces that a part still waits for
        self._arrived: dict[Part, dict[str, list[Tensor | None]]] = {}
        self._rooms: dict[str, Tensor] = {}
        self._sums = sums
        self.heap = Heap()
        self._joined: dict[tuple[Part, str], list[str]] = {}  # names of the pieces of one joined tensor, in order
        for name, place in places.items():
            self.pending[place.part] = self.pending.get(place.part, 0) + 1
            self._joined.setdefault((place.part, place.kind), []).append(name)

    def room(self, name: str) -> Tensor:
        """Memory of the device for a tensor, in its saved dtype; given out once."""
        if name not in self._rooms:
            place = self._places[name]
            self._allocate(self._joined[place.part, place.kind])
        return self._rooms.pop(name)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor; the last one of a part fills it."""
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
        """One tensor for all pieces that are saved alike, and a slice of it for each."""
        for dtype in {self._saved[name] for name in names}:
            alike = [name for name in names if self._saved[name] == dtype]
            counts = [torch.Size(self._places[name].wanted.shape).numel() for name in alike]
            whole = torch.empty(sum(counts), dtype=dtype, device=self._placement.device)  # the pieces' values, in order
            for name, piece in zip(alike, whole.split(counts)):
                self._rooms[name] = piece.view(self._places[name].wanted.shape)
