"""What recurrent layers have in common: how states lie in pages, the convolution's taps, and numbers that stay float32.

Owner: the model; read only after loading. StateForm says how many positions are folded into a state at once and how
many a tail has; it follows from the device and from the tokens that a row may draft.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.cache.spec import CacheSpec, LayerCache
from engine.cache.state import StateSpec
from engine.kernels.gemm.pack import Placement
from engine.kernels.state.delta import StatePages, cut
from engine.kernels.state.places import Part
from engine.weights.table import Wanted

FOLD = 16  # positions of an accelerator's fold


@dataclass(frozen=True, slots=True)
class StateForm:
    """How states lie in pages."""

    chunk: int  # positions that are folded at once; a base is a multiple
    ring: int  # positions of a tail: a chunk, and two steps in flight
    dtype: torch.dtype = torch.float32  # of states


def state_form(device: str, drafts: int = 0, dtype: torch.dtype = torch.float32) -> StateForm:
    """Of a device, where a row may compute 1 + drafts tokens in a step."""
    chunk = 1 if torch.device(device).type == "cpu" else FOLD
    return StateForm(chunk, max(chunk + 2 * (1 + drafts), chunk - 1 + 3 * (1 + drafts)), dtype)


class PagesOf:
    """A layer's pages as its parts lie in them; found once for the pages of an engine."""

    __slots__ = ("parts", "placed", "ring", "tail")

    placed: StatePages | None

    def __init__(self, parts: tuple[tuple[Part, ...], tuple[Part, ...]], ring: int) -> None:
        (self.parts, self.tail), self.ring = parts, ring
        self.placed = None

    def spec(self, form: StateForm) -> StateSpec:
        """Of the layer's cache."""
        return StateSpec(self.parts, self.tail, form.chunk, self.ring)

    def __call__(self, cache: LayerCache) -> StatePages:
        (pages,) = cache
        if self.placed is None or self.placed.pages is not pages:
            self.placed = cut(pages, self.parts, self.tail, self.ring)
        return self.placed


class StateMixer:
    """A layer with a state. `shape` has the numbers of its kernels; `dtype` is the model's."""

    __slots__ = ("_pages", "dtype", "form", "shape")

    shape: Any  # DeltaShape, SsdShape or SelectiveShape

    def __init__(self, shape: Any, form: StateForm, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.set_form(form)

    def set_form(self, form: StateForm) -> None:
        """Before the cache is laid out."""
        self.form, self.shape = form, replace(self.shape, ring=form.ring)
        self._pages = PagesOf(self.shape.parts(self.dtype, form.dtype), form.ring)

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """`dtype` is the one that the layer was made for."""
        return self._pages.spec(self.form)


class ConvTaps:
    """A short convolution's weight of each column, and its bias."""

    __slots__ = ("bias", "count", "has_bias", "weight", "width")

    weight: Tensor  # [count, width] float32, the token's own first
    bias: Tensor | None  # [width] float32

    def __init__(self, width: int, count: int, bias: bool) -> None:
        self.width, self.count, self.has_bias = width, count, bias

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        wanted: dict[str, tuple[Wanted | None, ...]] = {"weight": (Wanted((self.width, 1, self.count)),)}
        return {**wanted, "bias": (Wanted((self.width,)),)} if self.has_bias else wanted

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        ((weight,), (bias,)) = pieces["weight"], pieces.get("bias", [None])
        assert weight is not None
        self.weight = weight.to(placement.device, torch.float32)[:, 0].flip(1).t().contiguous()
        self.bias = None if bias is None else bias.to(placement.device, torch.float32, copy=True)


class Numbers:
    """Tensors of a layer that are no module's weight or bias (A_log, dt_bias, D): float32 always."""

    __slots__ = ("shapes", "values")

    values: dict[str, Tensor]

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {name: (Wanted(shape, in_memory=torch.float32),) for name, shape in self.shapes.items()}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        self.values = {}
        for name, (piece,) in pieces.items():
            assert piece is not None
            self.values[name] = piece.to(placement.device, torch.float32, copy=True).contiguous()
