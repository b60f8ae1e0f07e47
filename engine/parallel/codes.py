"""DealtStored: the slice of a quantised matrix that a rank has.

Owner: the thread that builds the model. The first rank reads the whole matrix into canonical codes where its tensors
arrived, and cuts rows and columns there: so all formats are dealt out by the same lines. Only the cut parts go to the
other ranks' devices.

    rank 0   read | cut for ranks 0 .. n-1, copy each to its device | take     per matrix of a part
    rank 1                                                           take      when rank 0's part is packed

Memory during loading: on rank 0's device the tensors of one part, a layer's experts for example, one whole matrix of
codes, and rank 0's cut matrices of the part; on the other devices the rank's cut matrices of the part.

No format is known here. Scales follow the rows and the groups of columns. A matrix whose columns are sorted by group
(act-order) has no ranges of columns: it becomes floats with the values that its codes have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.base.dealing import Axis, ranges
from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes, copied
from engine.layers.moe import Experts
from engine.parallel.pieces import axes_of_experts, parts_of_first, places_on
from engine.quant.base import Quantised, Stored
from engine.quant.checks import Checks
from engine.weights.table import Wanted, Weighted, addressed


@dataclass(frozen=True, slots=True, eq=False)
class SharedMatrix:
    """One matrix of the checkpoint, which is read once for all ranks."""

    stored: Stored
    shape: tuple[int, int]
    rows: Axis | None  # None: every rank has all rows
    columns: Axis | None
    devices: tuple[str, ...]  # of the ranks
    waiting: dict[int, Codes | Tensor] = field(default_factory=dict)  # parts by rank, each until its rank takes it

    def take(self, rank: int, tensors: Mapping[str, Tensor], checks: Checks) -> Codes | Tensor:
        """The part of a rank, on its device; for the first rank that asks, the matrix is read and dealt out."""
        if rank not in self.waiting:
            matrix = self.stored.read(tensors, checks)
            if self.columns is not None and isinstance(matrix, Codes) and matrix.order is not None:
                matrix = matrix.dense().float()
            self.waiting.update((each, self._part(matrix, each)) for each in range(len(self.devices)))
        return self.waiting.pop(rank)

    def _part(self, matrix: Codes | Tensor, rank: int) -> Codes | Tensor:
        """A copy: a view would hold the whole matrix."""
        if self.rows is not None:
            runs = ranges(self.rows, rank, len(self.devices))
            index: Tensor | slice = slice(*runs[0])
            if len(runs) > 1:
                device = (matrix.values if isinstance(matrix, Codes) else matrix).device
                index = torch.cat([torch.arange(first, end, device=device) for first, end in runs])
            matrix = matrix.rows(index) if isinstance(matrix, Codes) else matrix[index]
        if self.columns is not None:
            ((first, end),) = ranges(self.columns, rank, len(self.devices))
            matrix = matrix.columns(first, end) if isinstance(matrix, Codes) else matrix[:, first:end]
        own = self.devices[rank]
        return matrix.copied(own) if isinstance(matrix, Codes) else copied(matrix, own)

    def share(self, rank: int) -> float:
        """The part of the matrix's numbers that a rank has."""
        found = 1.0
        for axis, whole in zip((self.rows, self.columns), self.shape):
            if axis is not None:
                found *= sum(end - first for first, end in ranges(axis, rank, len(self.devices))) / whole
        return found


@dataclass(frozen=True, slots=True)
class DealtStored:
    """A rank's part of a matrix of the checkpoint."""

    matrix: SharedMatrix
    rank: int

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        """The tensors of the whole matrix; rows and columns are those of the slice."""
        return self.matrix.stored.wants(*self.matrix.shape)

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes | Tensor:
        return self.matrix.take(self.rank, tensors, checks)

    @property
    def form(self) -> str:
        return self.matrix.stored.form


def rank_bytes(member: Weighted, rank: int) -> int:
    """The bytes that a rank's weights take on its device: of a matrix of codes, those of the rank's part."""
    total = 0.0
    for place in places_on(member, rank).values():
        scheme = getattr(place.part, "scheme", None)
        stored = scheme.pieces[place.index] if isinstance(scheme, Quantised) and place.kind != "bias" else None
        size = place.wanted.num_bytes(member.dtype)
        total += size * stored.matrix.share(rank) if isinstance(stored, DealtStored) else size
    return int(total)


def deal_codes(whole: Weighted, members: Sequence[Weighted]) -> None:
    """Gives the parts of the ranks' models the schemes of the whole model's parts, with slices in them."""
    ours: list[dict[str, Any]] = [
        {path: part for path, _, part in addressed(member.weight_table(), member)} for member in members
    ]
    devices, of_first = tuple(member.device for member in members), set(map(id, parts_of_first(whole)))
    part: Any
    for path, names, part in addressed(whole.weight_table(), whole):
        scheme = getattr(part, "scheme", None)
        if isinstance(part, Experts) and part.is_whole:
            for own in ours:
                _hand_over(part, own[path])
            continue
        if (
            getattr(part, "stacked", None) is not None
            or getattr(part, "making", None) is not None
            or (isinstance(part, Experts) and part.stacked_codes)
        ):
            raise ConfigError(
                f"{names[0]} has the codes of all experts in one tensor, whose width is not dealt out over ranks yet; "
                "give --enable-expert-parallel, with which each rank has whole experts"
            )
        if not isinstance(scheme, Quantised):
            continue
        if id(part) in of_first:
            ours[0][path].scheme = scheme
            continue
        matrices = [
            None if stored is None else SharedMatrix(stored, *_axes_of(part, number), devices)
            for number, stored in enumerate(scheme.pieces)
        ]
        for rank, own in enumerate(ours):
            pieces = (None if matrix is None else DealtStored(matrix, rank) for matrix in matrices)
            own[path].scheme = Quantised(tuple(pieces), scheme.modules)


def _hand_over(part: Experts, own: Experts) -> None:
    """Gives a rank's experts the storage of these among all experts."""
    own.making, own.stacked = part.making, part.stacked and replace(part.stacked, count=own.num_experts)
    scheme = getattr(part, "scheme", None)
    if isinstance(scheme, Quantised):
        each, first = len(part.pieces), own.first - part.first
        span = slice(first * each, (first + own.num_experts) * each)
        own.scheme = Quantised(scheme.pieces[span], scheme.modules[span])


def _axes_of(part: Any, number: int) -> tuple[tuple[int, int], Axis | None, Axis | None]:
    """(whole shape, axis of the rows, axis of the columns) of a piece."""
    if isinstance(part, Experts):
        rows, columns = axes_of_experts(part, "weight")
        return (part.pieces[number % len(part.pieces)], part.in_features), rows, columns
    rows = getattr(part, "rows", None)
    sizes = getattr(part, "out_features", None) or (part.num_experts,)
    return (sizes[number], part.in_features), rows and rows[number], getattr(part, "columns", None)
