"""DealtStored: the slice of a quantised matrix that a rank has.

Owner: the thread that builds the model. Each rank reads the whole matrix into canonical codes, and cuts rows and
columns there: so all formats are dealt out by the same lines. No format is known here. Scales follow the rows and the
groups of columns. A matrix whose columns are sorted by group (act-order) has no ranges of columns: it becomes floats
with the values that its codes have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.base.dealing import Axis, ranges
from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes
from engine.layers.moe import Experts
from engine.parallel.pieces import axes_of_experts, places_on
from engine.quant.base import Quantised, Stored
from engine.weights.table import Wanted, Weighted, addressed


@dataclass(frozen=True, slots=True)
class DealtStored:
    """Reads one matrix of the checkpoint, and keeps a rank's part."""

    stored: Stored
    shape: tuple[int, int]  # of the whole matrix
    rows: Axis | None  # None: all rows
    columns: Axis | None
    rank: int
    ranks: int

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        """The tensors of the whole matrix; rows and columns are those of the slice."""
        return self.stored.wants(*self.shape)

    def read(self, tensors: Mapping[str, Tensor]) -> Codes | Tensor:
        matrix = self.stored.read(tensors)
        if self.rows is not None:
            runs = ranges(self.rows, self.rank, self.ranks)
            device = (matrix.values if isinstance(matrix, Codes) else matrix).device
            index = torch.cat([torch.arange(first, end, device=device) for first, end in runs])
            matrix = matrix.rows(index) if isinstance(matrix, Codes) else matrix[index]
        if self.columns is not None:
            ((first, end),) = ranges(self.columns, self.rank, self.ranks)
            if isinstance(matrix, Codes) and matrix.order is not None:
                matrix = matrix.dense().float()
            matrix = matrix.columns(first, end) if isinstance(matrix, Codes) else matrix[:, first:end].contiguous()
        return matrix

    @property
    def form(self) -> str:
        return self.stored.form

    @property
    def share(self) -> float:
        """The part of the matrix's numbers that the rank has."""
        found = 1.0
        for axis, whole in zip((self.rows, self.columns), self.shape):
            if axis is not None:
                found *= sum(end - first for first, end in ranges(axis, self.rank, self.ranks)) / whole
        return found


def rank_bytes(member: Weighted, rank: int) -> int:
    """The bytes that a rank's weights take on its device. Codes are read whole, and then cut."""
    total = 0.0
    for place in places_on(member, rank).values():
        scheme = getattr(place.part, "scheme", None)
        stored = scheme.pieces[place.index] if isinstance(scheme, Quantised) and place.kind != "bias" else None
        size = place.wanted.num_bytes(member.dtype)
        total += size * stored.share if isinstance(stored, DealtStored) else size
    return int(total)


def deal_codes(whole: Weighted, member: Weighted, rank: int, ranks: int) -> None:
    """Gives the parts of a rank's model the schemes of the whole model's parts, with slices in them."""
    ours: dict[str, Any] = {path: part for path, _, part in addressed(member.weight_table(), member)}
    part: Any
    for path, names, part in addressed(whole.weight_table(), whole):
        scheme = getattr(part, "scheme", None)
        if isinstance(part, Experts) and part.is_whole:
            _hand_over(part, ours[path])
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
        own: Any = ours[path]
        pieces = []
        for number, stored in enumerate(scheme.pieces):
            if stored is not None:
                rows, columns, shape = _axes_of(part, number)
                stored = DealtStored(stored, shape, rows, columns, rank, ranks)
            pieces.append(stored)
        own.scheme = Quantised(tuple(pieces), scheme.modules)


def _hand_over(part: Experts, own: Experts) -> None:
    """Gives a rank's experts the storage of these among all experts."""
    own.making, own.stacked = part.making, part.stacked and replace(part.stacked, count=own.num_experts)
    scheme = getattr(part, "scheme", None)
    if isinstance(scheme, Quantised):
        each, first = len(part.pieces), own.first - part.first
        span = slice(first * each, (first + own.num_experts) * each)
        own.scheme = Quantised(scheme.pieces[span], scheme.modules[span])


def _axes_of(part: Any, number: int) -> tuple[Axis | None, Axis | None, tuple[int, int]]:
    """(axis of the rows, axis of the columns, whole shape) of a piece."""
    if isinstance(part, Experts):
        rows, columns = axes_of_experts(part, "weight")
        return rows, columns, (part.pieces[number % len(part.pieces)], part.in_features)
    rows = getattr(part, "rows", None)
    sizes = getattr(part, "out_features", None) or (part.num_experts,)
    return rows and rows[number], getattr(part, "columns", None), (sizes[number], part.in_features)
