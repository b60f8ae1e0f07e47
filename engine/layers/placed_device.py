"""Adapters in places on an accelerator: the layers' terms by the kernels of engine/kernels/lora.

Owner: the model. The list of rows is made on the device from the numbers of the step's tokens, once in each forward, so
that graphs are the same for all steps. In: an adapter's matrices, which the adapters part copies into a place. A CPU's
places are in engine/layers/placed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from engine.device.accelerator import Branch
from engine.kernels.activation import Activation
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.weight import Weight
from engine.kernels.lora.expand import BLOCK_N, blocks_of, empty_after, expand
from engine.kernels.lora.expand_gated import expand_gated
from engine.kernels.lora.expand_summed import expand_summed, sums_at_once
from engine.kernels.lora.matrices import PlaceMatrices, SiteShape
from engine.kernels.lora.next_low import NextLow, empty_next_low
from engine.kernels.lora.rows import FEW, INVARIANT_TILE, PlaceList, pair_list, place_list, tile_of
from engine.kernels.lora.shrink import shrink
from engine.kernels.moe.combine import Summands
from engine.kernels.moe.sort import Pairs
from engine.layers.adapted import AdaptedWeight, Delta
from engine.layers.adapted_experts import ExpertsDelta, NormOf
from engine.layers.norm import RMSNorm


class Coming:
    """A x that a kernel computed for the next layer (kernels/lora/next_low), and which layer is next."""

    __slots__ = ("_made", "_readers")

    def __init__(self) -> None:
        self._made: tuple[Tensor, NextLow] | None = None  # the newest rows that a kernel made, and A x of their reader
        self._readers: dict[int, tuple[Tensor, DevicePlaces]] = {}  # by the gain of the norm that a layer reads

    def read_through(self, gain: Tensor, site: DevicePlaces) -> None:
        """The layer of `site` reads the residual stream through the norm with this gain."""
        self._readers[id(gain)] = gain, site

    def reader_of(self, gain: Tensor) -> DevicePlaces | None:
        """The layer that reads the residual stream through a norm."""
        found = self._readers.get(id(gain))
        return None if found is None else found[1]

    def expect(self, x: Tensor, next_low: NextLow | None) -> None:
        """A kernel made x, and A x for the layer that reads x next."""
        self._made = None if next_low is None else (x, next_low)

    def forget(self) -> None:
        """Drops what no layer has read."""
        self._made = None

    def low_of(self, x: Tensor, shape: SiteShape) -> Tensor | None:
        """A x of a layer. None: the kernel that made x has not computed it."""
        found, self._made = self._made, None
        return found[1].low if found is not None and found[0] is x and found[1].shape is shape else None


class DeviceRows:
    """The place of each row of the current forward; a TokenAdapters (engine/layers/adapted.py)."""

    branches: ClassVar[bool] = True  # A x may run on another stream
    __slots__ = ("_first", "_numbers", "_pairs", "_places", "coming", "invariant", "listed")

    def __init__(self, places: int, invariant: bool, first: int = 0) -> None:
        """`invariant`: a row's bits do not depend on other rows, and the base's rows not on whether a row has an
        adapter. `first`: numbers up to it are no places (engine/layers/adapted.OwnAndNamed)."""
        self._places, self.invariant, self._first = places, invariant, first
        self._numbers: Tensor | None = None
        self._pairs: tuple[Tensor, PlaceList] | None = None  # the newest chosen experts, and the list of their pairs
        self.coming = Coming()
        self.listed: PlaceList | None = None  # of the current forward; None: no row has an adapter

    def begin(self, numbers: Tensor | None, named: bool = True) -> None:
        self._begin(numbers if numbers is None or not self._first else (numbers - self._first).clamp_(min=0))

    def _begin(self, places: Tensor | None) -> None:
        self._numbers = None if places is None else places.contiguous()
        self.listed = self._pairs = None
        self.coming.forget()
        if self._numbers is not None:
            tile = INVARIANT_TILE if self.invariant else tile_of(len(self._numbers), self._places)
            self.listed = place_list(self._numbers, self._places, tile)

    @property
    def acts(self) -> bool:
        """Whether a row of the current forward may have an adapter."""
        return self.listed is not None

    def listed_for(self, rows: int) -> PlaceList:
        """The list of the forward's rows."""
        assert self.listed is not None, "no row has an adapter"
        assert self.listed.order.shape[0] == rows, f"{rows} rows in a forward of {len(self.listed.order)}"
        return self.listed

    def pairs(self, chosen: Tensor, experts: int) -> PlaceList:
        """The list of the pairs of chosen [T, top_k] int32; both products of a layer have the same."""
        assert self._numbers is not None, "no row has an adapter"
        if self._pairs is None or self._pairs[0] is not chosen:
            listed = pair_list(self._numbers, chosen, self._places, experts, self.invariant)
            self._pairs = chosen, replace(listed, settled=True)  # by the first reader's wait
            return listed
        return self._pairs[1]

    def keep(self, index: Tensor) -> None:
        if self._numbers is not None:
            self._begin(self._numbers.index_select(0, index))


class DeviceItem:
    """The place of all rows of a tower's run, which encodes one item; an ItemAdapter (engine/models/base/model.py)."""

    branches: ClassVar[bool] = False
    __slots__ = ("_device", "_lists", "_place", "_places", "coming", "invariant")

    def __init__(self, places: int, invariant: bool, device: str) -> None:
        self._places, self.invariant, self._device = places, invariant, device
        self._place = 0
        self.coming = Coming()  # always empty: layers of towers compute A x themselves
        self._lists: dict[int, PlaceList] = {}  # of the current item, by number of rows

    @property
    def acts(self) -> bool:
        """Whether the current item has an adapter."""
        return bool(self._place)

    def begin_item(self, place: int) -> None:
        self._place = place
        self._lists.clear()

    def listed_for(self, rows: int) -> PlaceList:
        """The list of so many rows with the item's place."""
        if rows not in self._lists:
            numbers = torch.full((rows,), self._place, dtype=torch.int32, device=self._device)
            tile = INVARIANT_TILE if self.invariant else tile_of(rows, self._places)
            self._lists[rows] = place_list(numbers, self._places, tile)
        return self._lists[rows]


class DevicePlaces:
    """The places' matrices at one layer."""

    __slots__ = ("_blocks", "_branch", "_matrices", "following", "norm", "rows", "shape")

    def __init__(self, shape: SiteShape, rows: DeviceRows | DeviceItem) -> None:
        self.shape, self.rows = shape, rows
        self.following: DevicePlaces | None = None  # reads what this layer makes
        self.norm: RMSNorm | None = None  # only this layer reads the residual stream through it
        self._matrices: PlaceMatrices
        self._blocks: Tensor
        self._branch: Branch

    def place_in(self, matrices: PlaceMatrices, branch: Branch) -> None:
        """Gives the site the memory of all places and a branch that all sites share, before the first forward."""
        self._matrices, self._branch = matrices, branch
        self._blocks = blocks_of(self.shape, matrices.values.device)
        if self.norm is not None:
            self.rows.coming.read_through(self.norm.weight, self)

    @property
    def acts(self) -> bool:
        return self.rows.acts

    @property
    def apart(self) -> bool:
        return self.acts or self.rows.invariant

    @property
    def num_bytes(self) -> int:
        """The matrices are memory of the adapters part."""
        return 0

    def _next_low(self, reader: DevicePlaces | None, width: int, made: PlaceList, rows: PlaceList) -> NextLow | None:
        """Memory for A x of the layer that reads the `width` columns that this layer's kernel makes, or their norm.
        made, rows: this kernel's list, and the reader's."""
        if reader is None or reader.shape.in_features != width:
            return None
        return empty_next_low(reader.shape, rows, made, self._matrices, BLOCK_N)


class DeviceSite(DevicePlaces, Delta):
    """The places' matrices at one linear layer; a Delta."""

    __slots__ = ()
    takes_unscaled = True

    def around(self, base: Weight) -> Weight:
        """The layer's weight with adapters."""
        return AdaptedWeight(base, self)

    def lowered(self, x: Tensor | Unscaled) -> Tensor | None:
        """For single rows the kernel comes first in the compute stream, and the layer's own product begins during it.
        For up to FEW rows it runs on a branch meanwhile, because that product waits for its weights. More rows keep the
        device's units busy: of 256 rows on an H200 a branch made steps 3 % longer."""
        if not self.acts:
            return None
        inputs = inputs_of(x, self.shape)
        listed = self.rows.listed_for(inputs.shape[0])
        if listed.tile > 1 and not self._branches(listed):
            return None
        low = self.rows.coming.low_of(x if isinstance(x, Tensor) else x.rows, self.shape)
        return low if low is not None else self._shrunk(inputs, listed, self._branch if listed.tile > 1 else None)

    def add_to(self, y: Tensor, x: Tensor | Unscaled, low: Tensor | None) -> None:
        self._add(y, x, low, None, None)

    def gated(self, halves: Tensor, x: Tensor | Unscaled, low: Tensor | None, activation: Activation) -> Tensor:
        if not self.acts or self.rows.invariant:  # rows of the base have the same bits in both cases
            return super().gated(halves, x, low, activation)
        terms, flat = self._terms(x, low), halves.view(-1, self.shape.width)
        next_low = self._next_low(self.following, self.shape.width // 2, terms.listed, terms.listed)
        made = expand_gated(
            flat, terms.low, self._matrices, self.shape, terms.listed, activation, terms.before, terms.joins, next_low
        )
        made = made if halves.dim() == 2 else made.view(*halves.shape[:-1], -1)
        self.rows.coming.expect(made, next_low)
        return made

    def add_then_norm(self, y: Tensor, x: Tensor, low: Tensor | None, gain: Tensor, eps: float) -> Unscaled | None:
        if not self.acts:
            return None
        after = empty_after(y, gain, eps) if len(y) <= FEW and not self.rows.invariant else None
        if after is None:
            self._add(y, x, low, None, None)
            return None
        listed = self.rows.listed_for(y.shape[0])
        next_low = self._next_low(self.rows.coming.reader_of(gain), y.shape[1], listed, listed)
        self._add(y, x, low, after, next_low)
        self.rows.coming.expect(after.rows, next_low)
        return after

    def _add(
        self, y: Tensor, x: Tensor | Unscaled, low: Tensor | None, after: Unscaled | None, next_low: NextLow | None
    ) -> None:
        terms, flat = self._terms(x, low), y.view(-1, self.shape.width)
        ours = terms.low, self._matrices, self.shape, terms.listed, self._blocks
        expand(flat, *ours, terms.before, after, terms.joins, next_low)

    def _terms(self, x: Tensor | Unscaled, low: Tensor | None) -> Terms:
        """A x, made unless `low` is it."""
        inputs = inputs_of(x, self.shape)
        listed = self.rows.listed_for(inputs.shape[0])
        joins = low is not None and listed.tile > 1
        if joins:
            self._branch.join()
        if low is None:
            low = self._shrunk(inputs, listed, None)
        return Terms(low, listed, None if isinstance(x, Tensor) else x, joins)

    def _shrunk(self, inputs: Tensor, listed: PlaceList, branch: Branch | None) -> Tensor:
        return shrink(inputs, self._matrices, self.shape, listed, self.rows.invariant, 1, branch)

    def _branches(self, listed: PlaceList) -> bool:
        """Whether A x of several rows runs during the layer's own product."""
        return self.rows.branches and len(listed.order) <= FEW


class Terms(NamedTuple):
    """What an expand needs."""

    low: Tensor  # A x
    listed: PlaceList
    before: Unscaled | None  # x if it was prescaled
    joins: bool  # A x was launched on the branch


def inputs_of(x: Tensor | Unscaled, shape: SiteShape) -> Tensor:
    """The rows [rows, in_features] that a site reads."""
    return (x if isinstance(x, Tensor) else x.rows).reshape(-1, shape.in_features)


class DeviceExperts(DevicePlaces, ExpertsDelta):
    """The places' matrices at one product of all experts; an ExpertsDelta."""

    __slots__ = ()

    def lowered(self, x: Tensor, pairs: Pairs, during: bool = False) -> Tensor | None:
        if not self.acts:
            return None
        each = 1 if len(x) == pairs.count else pairs.top_k
        listed, invariant = self._listed(pairs), self.rows.invariant
        return shrink(x, self._matrices, self.shape, listed, invariant, each, during=during)

    def add_to(self, y: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs) -> None:
        assert low is not None, "no row has an adapter"
        expand(y, low, self._matrices, self.shape, self._listed(pairs), self._blocks)

    def gated(
        self, halves: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs, activation: Activation, down: ExpertsDelta
    ) -> tuple[Tensor, Tensor | None]:
        if low is None or self.rows.invariant:  # rows of the base have the same bits in both cases
            return super().gated(halves, x, low, pairs, activation, down)
        assert isinstance(down, DeviceExperts), "both products of a layer have places"
        listed = self._listed(pairs)
        next_low = self._next_low(down, self.shape.width // 2, listed, listed)
        made = expand_gated(halves, low, self._matrices, self.shape, listed, activation, next_low=next_low)
        return made, down.lowered(made, pairs) if next_low is None else next_low.low

    def summed(
        self, made: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs, sum_of: Summands, norm: NormOf | None
    ) -> tuple[Tensor, Unscaled | None]:
        listed = self._listed(pairs)
        if low is None or self.rows.invariant or not sums_at_once(listed, low):
            return super().summed(made, x, low, pairs, sum_of, norm)
        after, next_low, rows = None, None, self.rows.listed_for(len(made))
        if norm is not None and sum_of.residual is not None and len(made) <= FEW:
            after = empty_after(sum_of.residual, *norm)
        if norm is not None and after is not None:
            next_low = self._next_low(self.rows.coming.reader_of(norm.gain), made.shape[2], listed, rows)
        out = expand_summed(made, low, self._matrices, self.shape, listed, sum_of, after, next_low)
        if after is not None:
            self.rows.coming.expect(after.rows, next_low)
        return out, after

    def _listed(self, pairs: Pairs) -> PlaceList:
        assert isinstance(self.rows, DeviceRows), "experts are in decoders"
        return self.rows.pairs(pairs.chosen, self.shape.experts)
