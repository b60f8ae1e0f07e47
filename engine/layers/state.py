"""Parts that recurrent layers share: the form of states in pages, the convolution's taps, and float32 parameters.

Owner: the model; read only after loading. StateForm specifies how many positions are folded into a state at once and
how many positions a tail holds; the device and the number of draft tokens of a row determine both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.base.dealing import Axis, Section
from engine.cache.spec import CacheSpec, LayerCache
from engine.cache.state import StateSpec
from engine.kernels.gemm.pack import Placement
from engine.kernels.state.delta import StatePages, cut
from engine.kernels.state.delta_prepare import SIZE
from engine.kernels.state.places import Part
from engine.weights.table import Wanted

FOLD = 16  # positions that an accelerator folds at once
EXACT = SIZE  # the same, if no bit may depend on the cuts between steps: a base is where a chunk of a scan begins


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form of states and tails in pages."""

    chunk: int  # positions that are folded at once; a base is a multiple of `chunk`
    ring: int  # positions that a tail holds: a chunk, and two steps in flight
    dtype: torch.dtype = torch.float32  # of states
    exact: bool = False  # no bit depends on the cuts between steps; on a CPU without it as well


def state_form(
    device: str, drafts: int = 0, dtype: torch.dtype = torch.float32, chunk: int = FOLD, exact: bool = False
) -> StateForm:
    """The form for a device if a row may compute 1 + drafts tokens in a step; `chunk`, `exact`: for an accelerator."""
    if torch.device(device).type == "cpu":
        chunk, exact = 1, False
    return StateForm(chunk, max(chunk + 2 * (1 + drafts), chunk - 1 + 3 * (1 + drafts)), dtype, exact)


class PagesOf:
    """Places a layer's parts in its pages, once per engine."""

    __slots__ = ("parts", "placed", "ring", "tail")

    placed: StatePages | None

    def __init__(self, parts: tuple[tuple[Part, ...], tuple[Part, ...]], ring: int) -> None:
        (self.parts, self.tail), self.ring = parts, ring
        self.placed = None

    def spec(self, form: StateForm) -> StateSpec:
        """The spec of the layer's cache."""
        return StateSpec(self.parts, self.tail, form.chunk, self.ring)

    def __call__(self, cache: LayerCache) -> StatePages:
        (pages,) = cache
        if self.placed is None or self.placed.pages is not pages:
            self.placed = cut(pages, self.parts, self.tail, self.ring)
        return self.placed


class StateMixer:
    """A layer with a state. `shape` has the sizes for the kernels; `dtype` is the model's."""

    __slots__ = ("_pages", "dtype", "form", "shape")

    shape: Any  # DeltaShape, SsdShape or SelectiveShape
    exact_chunk = EXACT  # positions that an exact layer folds at once

    def __init__(self, shape: Any, form: StateForm, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.set_form(form)

    def set_form(self, form: StateForm) -> None:
        """Sets the form; callers do so before the cache is laid out."""
        self.form, self.shape = form, replace(self.shape, ring=form.ring, exact=form.exact)
        self._pages = PagesOf(self.shape.parts(self.dtype, form.dtype), form.ring)

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """The spec of the layer's cache; `dtype` must be the dtype of the layer."""
        return self._pages.spec(self.form)


class ConvTaps:
    """The taps of a short convolution, and its bias."""

    __slots__ = ("bias", "count", "has_bias", "rows", "weight", "width")

    weight: Tensor  # [count, width] float32, the token's own tap first
    bias: Tensor | None  # [width] float32

    def __init__(self, columns: Axis, count: int, bias: bool) -> None:
        """`columns`: those of the convolution, as ranks share them."""
        self.width, self.count, self.has_bias = sum(each.length for each in columns), count, bias
        self.rows = (columns,)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        wanted: dict[str, tuple[Wanted | None, ...]] = {"weight": (Wanted((self.width, 1, self.count)),)}
        return {**wanted, "bias": (Wanted((self.width,)),)} if self.has_bias else wanted

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        ((weight,), (bias,)) = pieces["weight"], pieces.get("bias", [None])
        assert weight is not None
        self.weight = weight.to(placement.device, torch.float32)[:, 0].flip(1).t().contiguous()
        self.bias = None if bias is None else bias.to(placement.device, torch.float32, copy=True)


class Numbers:
    """Parameters of the layer itself, not of a submodule (A_log, dt_bias, D); always float32."""

    __slots__ = ("rows", "shapes", "values")

    values: dict[str, Tensor]

    def __init__(self, units: int, **shapes: tuple[int, ...]) -> None:
        """`units`: heads or channels, of which each has a row of every parameter."""
        self.shapes = shapes
        self.rows = ((Section(units),),)  # how ranks share the parameters

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {name: (Wanted(shape, in_memory=torch.float32),) for name, shape in self.shapes.items()}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        self.values = {}
        for name, (piece,) in pieces.items():
            assert piece is not None
            self.values[name] = piece.to(placement.device, torch.float32, copy=True).contiguous()
