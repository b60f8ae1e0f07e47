"""Adapters in places on an accelerator: the layers' terms by the kernels of engine/kernels/lora.

Owner: the model. The list of rows is made on the device from the numbers of the step's tokens, once in each forward, so
that graphs are the same for all steps. In: an adapter's matrices, which the adapters part copies into a place. A CPU's
places are in engine/layers/placed.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.gemm.weight import Weight
from engine.kernels.lora.expand import blocks_of, expand
from engine.kernels.lora.matrices import PlaceMatrices, SiteShape
from engine.kernels.lora.rows import INVARIANT_TILE, PlaceList, place_list, tile_of
from engine.kernels.lora.shrink import shrink
from engine.layers.adapted import AdaptedWeight
from engine.layers.linear import Linear


class DeviceRows:
    """The place of each row of the current forward; a TokenAdapters (engine/layers/adapted.py)."""

    __slots__ = ("_numbers", "_places", "invariant", "listed")

    def __init__(self, places: int, invariant: bool) -> None:
        """`invariant`: a row's bits do not depend on other rows, and the base's rows not on whether a row has an
        adapter."""
        self._places, self.invariant = places, invariant
        self._numbers: Tensor | None = None
        self.listed: PlaceList | None = None  # of the current forward; None: no row has an adapter

    def begin(self, numbers: Tensor | None) -> None:
        self._numbers = numbers
        self.listed = None
        if numbers is not None:
            tile = INVARIANT_TILE if self.invariant else tile_of(len(numbers))
            self.listed = place_list(numbers.contiguous(), self._places, tile)

    def keep(self, index: Tensor) -> None:
        if self._numbers is not None:
            self.begin(self._numbers.index_select(0, index))


class DeviceSite:
    """The places' matrices at one linear layer; a Delta."""

    __slots__ = ("_blocks", "_matrices", "rows", "shape")

    def __init__(self, linear: Linear, number: int, rows: DeviceRows) -> None:
        """`number`: of the site, from 0."""
        self.shape = SiteShape(number, linear.in_features, linear.out_features)
        self.rows = rows
        self._matrices: PlaceMatrices
        self._blocks: Tensor

    def place_in(self, matrices: PlaceMatrices) -> None:
        """Gives the site the memory of all places, before the first forward."""
        self._matrices, self._blocks = matrices, blocks_of(self.shape, matrices.values.device)

    def around(self, base: Weight) -> Weight:
        """The layer's weight with adapters."""
        return AdaptedWeight(base, self)

    @property
    def acts(self) -> bool:
        return self.rows.listed is not None

    @property
    def apart(self) -> bool:
        return self.acts or self.rows.invariant

    @property
    def num_bytes(self) -> int:
        """The matrices are memory of the adapters part."""
        return 0

    def add_to(self, y: Tensor, x: Tensor) -> None:
        listed, shape = self.rows.listed, self.shape
        assert listed is not None, "no row has an adapter"
        inputs = x.reshape(-1, shape.in_features)
        low = shrink(inputs, self._matrices, shape, listed, self.rows.invariant)
        expand(y.view(-1, y.shape[-1]), low, self._matrices, shape, listed, self._blocks)
