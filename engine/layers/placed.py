"""Adapters in places: the matrices of adapters that requests choose by name, at a layer on a CPU.

    y[rows of place p] += B_p (A_p x[rows of place p])      for each place p that a row of the forward uses

Experts have matrices of their own: the rows are then the pairs of place p and expert e.

Owner: the model. A place holds one adapter at a time; its number is step data like the token's position. In: an
adapter's packed matrices (engine/lora/adapter.py) for a place that no row uses. Out: the terms of the adapters. A row's
bits depend only on the row and its adapter, as in kernels/gemm/panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.panels import CpuPanels, pack_panels
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.sort import Pairs
from engine.layers.adapted import AdaptedWeight, Delta
from engine.layers.adapted_experts import ExpertsDelta
from engine.layers.linear import Linear


class Group(NamedTuple):
    """The rows of a forward that use one place."""

    place: int
    rows: Tensor | None  # [n] int64, ascending; None: all rows


class PlaceRows:
    """The place of each token of the current forward; a TokenAdapters (engine/layers/adapted.py)."""

    __slots__ = ("_first", "_numbers", "groups")

    def __init__(self, first: int = 0) -> None:
        """`first`: numbers up to it are no places (engine/layers/adapted.OwnAndNamed)."""
        self._first = first
        self._numbers: Tensor | None = None  # int32 [rows]
        self.groups: Sequence[Group] = ()

    @property
    def acts(self) -> bool:
        """Whether a row of the current forward has an adapter."""
        return bool(self.groups)

    def check(self, rows: int) -> None:
        """Fails if a layer's input has other rows than the forward."""
        assert self._numbers is None or len(self._numbers) == rows, f"{rows} rows in a forward of other rows"

    def begin(self, numbers: Tensor | None, named: bool = True) -> None:
        self._begin(numbers if numbers is None or not self._first else (numbers - self._first).clamp_(min=0))

    def _begin(self, places: Tensor | None) -> None:
        self._numbers = places
        self.groups = () if places is None else groups_of(places)

    def keep(self, index: Tensor) -> None:
        if self._numbers is not None:
            self._begin(self._numbers.index_select(0, index))


class ItemRows(PlaceRows):
    """The place of all rows of a tower's run, which encodes one item; an ItemAdapter (engine/models/base/model.py)."""

    __slots__ = ()

    def begin_item(self, place: int) -> None:
        self.groups = [Group(place, None)] if place else ()


def groups_of(numbers: Tensor) -> list[Group]:
    """The groups of rows with places numbers int32 [T]; 0: no place."""
    places = torch.unique(numbers).tolist()
    if len(places) == 1 and places[0]:
        return [Group(places[0], None)]
    return [Group(place, torch.nonzero(numbers == place).flatten()) for place in places if place]


class Halves(NamedTuple):
    """An adapter's matrices of one layer, in panels."""

    down: CpuPanels  # A of all pieces, [pieces * rank, in]
    ups: tuple[tuple[int, CpuPanels], ...]  # for each piece that the adapter changes: its number, and B [rows, rank]
    rank: int

    @property
    def num_bytes(self) -> int:
        return self.down.num_bytes + sum(up.num_bytes for _, up in self.ups)


def packed(a: Tensor, b: Sequence[Tensor]) -> Halves:
    """a [pieces * rank, in], b [rows, rank] for each piece -> panels. A piece whose B is zero is left out."""
    ups = tuple((number, pack_panels(piece, None)) for number, piece in enumerate(b) if piece.any())
    return Halves(pack_panels(a, None), ups, len(a) // len(b))


class PlacedSite(Delta):
    """The places' matrices at one linear layer; a Delta."""

    __slots__ = ("held", "linear", "rows", "starts")

    def __init__(self, linear: Linear, rows: PlaceRows, num_places: int) -> None:
        self.linear, self.rows = linear, rows
        self.held: list[Halves | None] = [None] * (num_places + 1)  # by the place's number, from 1
        sizes = linear.out_features
        self.starts = [sum(sizes[:number]) for number in range(len(sizes))]  # first column of each piece

    def around(self, base: Weight) -> Weight:
        """The layer's weight with adapters."""
        return AdaptedWeight(base, self)

    @property
    def acts(self) -> bool:
        return self.rows.acts

    @property
    def num_bytes(self) -> int:
        return sum(halves.num_bytes for halves in self.held if halves is not None)

    def hold(self, number: int, matrices: tuple[Tensor, Sequence[Tensor]] | None) -> None:
        """Puts an adapter's A and B for this layer into a place; None: the adapter leaves the layer alone."""
        self.held[number] = None if matrices is None else packed(*matrices)

    def add_to(self, y: Tensor, x: Tensor | Unscaled, low: Tensor | None) -> None:
        assert isinstance(x, Tensor), "a CPU prescales no rows"
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        self.rows.check(len(inputs))
        for place, index in self.rows.groups:
            halves = self.held[place]
            if halves is not None:  # else the adapter leaves this layer alone
                mine = inputs if index is None else inputs.index_select(0, index)
                add_product(outputs, halves, mine, index, self.starts)


def add_product(y: Tensor, halves: Halves, x: Tensor, index: Tensor | None, starts: Sequence[int]) -> None:
    """y[index] += B (A x), in place; index None: all rows; starts: the first column of each piece."""
    low, rank = halves.down.linear(x), halves.rank
    for piece, up in halves.ups:
        delta = up.linear(low[:, piece * rank : (piece + 1) * rank])
        columns = y.narrow(1, starts[piece], up.out_features)
        if index is None:
            columns += delta
        else:
            columns.index_add_(0, index, delta)


class HeldExperts:
    """An adapter's matrices of one product of all experts; panels are made when an expert is first used."""

    __slots__ = ("_a", "_b", "_panels")

    def __init__(self, a: Tensor, b: Sequence[Tensor]) -> None:
        """a [experts, pieces * rank, in]; b [experts, rows, rank] for each piece."""
        self._a, self._b = a, b
        self._panels: dict[int, Halves] = {}

    @property
    def num_bytes(self) -> int:
        return self._a.nbytes + sum(piece.nbytes for piece in self._b)

    def of(self, expert: int) -> Halves:
        """The matrices of one expert."""
        if expert not in self._panels:
            self._panels[expert] = packed(self._a[expert], [piece[expert] for piece in self._b])
        return self._panels[expert]


class PlacedExperts(ExpertsDelta):
    """The places' matrices at one product of all experts; an ExpertsDelta."""

    __slots__ = ("held", "rows", "starts")

    def __init__(self, pieces: Sequence[int], rows: PlaceRows, num_places: int) -> None:
        """`pieces`: rows of each piece of the product."""
        self.rows = rows
        self.held: list[HeldExperts | None] = [None] * (num_places + 1)  # by the place's number, from 1
        self.starts = [sum(pieces[:number]) for number in range(len(pieces))]  # first column of each piece

    @property
    def acts(self) -> bool:
        return self.rows.acts

    @property
    def apart(self) -> bool:
        return self.rows.acts

    @property
    def num_bytes(self) -> int:
        return sum(held.num_bytes for held in self.held if held is not None)

    def hold(self, number: int, matrices: tuple[Tensor, Sequence[Tensor]] | None) -> None:
        """Puts an adapter's A and B for this layer into a place; None: the adapter leaves the layer alone."""
        self.held[number] = None if matrices is None else HeldExperts(*matrices)

    def add_to(self, y: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs) -> None:
        self.rows.check(len(pairs.chosen))
        each, chosen = 1 if len(x) == pairs.count else pairs.top_k, pairs.chosen.flatten()
        for place, index in self.rows.groups:
            held = self.held[place]
            if held is None:
                continue
            tokens = torch.arange(len(pairs.chosen)) if index is None else index
            numbers = (tokens[:, None] * pairs.top_k + torch.arange(pairs.top_k)).flatten()
            experts = chosen[numbers]
            for expert in torch.unique(experts).tolist():
                mine = numbers[experts == expert]
                add_product(y, held.of(expert), x.index_select(0, mine // each), mine, self.starts)
