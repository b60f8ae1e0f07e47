"""DealtPieces: deals every tensor of a checkpoint out to the ranks' models; the loader reads each byte once.

Owner: the thread that builds the model. In: the tensors of the whole checkpoint, once each. Out: for every rank its
slice of each tensor, added to the rank's own Pieces, which fills the rank's parts. A part says how its axes are dealt
out (`rows`, `columns`: engine/layers/linear.py); a tensor without axes goes to every rank that has its part. Tensors of
codes are not copied: the first rank reads and cuts them (codes.py). Of the bias of a product whose results are summed
over the ranks all ranks but the first get zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from engine.base.dealing import Axis, Section, ranges, width
from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.timed import TimedProducts
from engine.layers.adapted import Site
from engine.layers.attention import HeadNorms
from engine.layers.linear import Linear
from engine.layers.moe import Experts
from engine.quant.base import Quantised
from engine.weights.finite import FiniteSums
from engine.weights.pieces import Pieces
from engine.weights.table import Part, Place, Weighted, addressed, expand, parts_of

# Attributes of a model whose parts rank 0 alone has, whole; replaced_parts: towers of transformers.
OF_FIRST = ("vision", "audio", "pooler", "replaced_parts")


def axes_of(place: Place) -> tuple[Axis | None, ...]:
    """How the axes of a tensor are dealt out; None, and axes that are not named: every rank has all of them."""
    if isinstance(place.part, Experts) and place.part.is_whole:
        return axes_of_whole(place.part, place)
    if isinstance(place.part, Site):
        return place.part.axes(place.kind, place.index)
    if is_read_whole(place):
        return ()
    if isinstance(place.part, Experts):
        return axes_of_experts(place.part, place.kind)
    rows: Sequence[Axis] | None = getattr(place.part, "rows", None)
    columns: Axis | None = getattr(place.part, "columns", None) if place.kind == "weight" else None
    along = None if rows is None else rows[place.index]
    turned = place.kind == "weight" and getattr(getattr(place.part, "scheme", None), "turned", False)
    return (columns, along) if turned else (along, columns)


def is_read_whole(place: Place) -> bool:
    """Whether the tensor is of a matrix of codes that one rank reads and cuts for all (codes.py)."""
    scheme = getattr(place.part, "scheme", None)
    has_bias = any(getattr(place.part, "biases", ())) or getattr(place.part, "has_own_bias", False)
    if not isinstance(scheme, Quantised) or (place.kind == "bias" and has_bias):
        return False
    return scheme.pieces[place.index] is not None and not (isinstance(place.part, Experts) and place.part.is_whole)


def axes_of_experts(part: Experts, kind: str) -> tuple[Axis | None, ...]:
    """Every expert's width is dealt out: the rows of gate and of up, the columns of down."""
    wide = width(part.in_features if part.is_down else part.pieces[0])
    along: Axis = (wide,) * (1 if part.is_down else len(part.pieces))
    if part.layout == "by turns" and part.is_gated:
        along = (wide._replace(size=2),)  # a number of gate next to its number of up
    if kind.endswith("_bias"):
        return None, None if part.is_down else along
    if part.layout == "apart":
        return (None, along) if part.is_down else ((wide,), None)
    if part.layout == "one below the other":
        return ((wide,) * part.num_experts,)
    turned = part.layout in ("turned", "by turns")
    return (None, along, None) if part.is_down == turned else (None, None, along)


def axes_of_whole(part: Experts, place: Place) -> tuple[Axis | None, ...]:
    """Whole experts are dealt out: in one tensor they are its first axis, else each tensor belongs to one rank."""
    shared = part.stacked is not None and place.kind in part.stacked.shared_names
    if part.layout == "apart" or shared:
        return ()
    return ((Section(part.num_experts, place.wanted.shape[0] // part.num_experts),),)


def is_summed(place: Place) -> bool:
    """Whether the tensor is the bias of a product whose results are summed over the ranks."""
    part = place.part
    if isinstance(part, Experts) and part.is_whole:
        return False
    if isinstance(part, Experts):
        summed = part.is_down
    else:
        summed = getattr(part, "columns", None) is not None or getattr(part, "of_summands", False)
    return summed and place.kind.endswith("bias")


def is_of_one_unit(place: Place) -> bool:
    """Whether the tensor belongs to one expert, or to one head, which not all ranks have."""
    if isinstance(place.part, HeadNorms):
        return place.part.split
    return isinstance(place.part, Experts) and place.part.is_whole and place.part.layout == "apart"


def cut(tensor: Tensor, axes: Sequence[Axis | None], rank: int, ranks: int) -> Tensor:
    """A rank's slice of a tensor: a view where it is one run of rows, else a copy."""
    for number, axis in enumerate(axes):
        if axis is not None:
            runs = [tensor.narrow(number, start, end - start) for start, end in ranges(axis, rank, ranks)]
            tensor = runs[0] if len(runs) == 1 else torch.cat(runs, number)
    return tensor.contiguous()


def parts_of_first(model: Weighted) -> list[Part]:
    """The parts that rank 0 alone has: towers, whose rows all ranks read, and the pooler."""
    found = addressed(model.weight_table(), model)
    return [part for path, _, part in found if path.partition(".")[0] in OF_FIRST]


def leave_first_whole(model: Weighted) -> None:
    """Marks the products of towers and poolers, which no rank cuts."""
    for part in parts_of_first(model):
        if isinstance(part, Linear):
            part.rows = part.columns = None


def places_on(model: Weighted, rank: int) -> dict[str, Place]:
    """The tensors of a rank's model."""
    others = {id(part) for part in parts_of_first(model)} if rank else set()
    places = expand(model.weight_table(), model)
    return {name: place for name, place in places.items() if id(place.part) not in others}


def check_marks(model: Weighted) -> None:
    """Raises ConfigError if the family's table contradicts the parts about what is dealt out."""
    for row, names, part in parts_of(model.weight_table(), model):
        if isinstance(part, Experts) and part.is_whole:
            continue
        if isinstance(part, Experts):
            axis: str | None = "columns" if part.is_down else "rows"
        elif isinstance(part, Linear):
            axis = "rows" if part.rows is not None else None if part.columns is None else "columns"
        else:
            continue
        if row.split != axis:
            raise ConfigError(
                f"{model.config.architecture} is not dealt out over ranks yet: its table says {row.split} of "
                f"{names[0]}, the layer {axis}; leave --tensor-parallel-size out"
            )


def check_slices(whole: Weighted, models: Sequence[Weighted]) -> None:
    """Raises ConfigError unless the slices of all tensors have the shapes that the ranks' parts want."""
    places = expand(whole.weight_table(), whole)
    of_first = places.keys() - places_on(whole, 1).keys()
    found = [places_on(model, rank) for rank, model in enumerate(models)]
    for name, place in places.items():
        holders = list(range(1 if name in of_first else len(models)))
        if is_of_one_unit(place):
            holders = [rank for rank, own in enumerate(found) if name in own] or holders
        for rank in holders:
            shape = tuple(
                length if axis is None else sum(end - start for start, end in ranges(axis, rank, len(models)))
                for length, axis in zip_longest(place.wanted.shape, axes_of(place)[: len(place.wanted.shape)])
            )
            if name not in found[rank] or found[rank][name].wanted.shape != shape:
                raise ConfigError(
                    f"{whole.config.architecture} is not dealt out over ranks yet: {name} has no slice for rank {rank} "
                    f"of {len(models)}; leave --tensor-parallel-size out"
                )


class DealtPieces(Pieces):
    """The arrived tensors of the whole checkpoint, on their way to the ranks."""

    def __init__(
        self,
        models: Sequence[Weighted],
        places: dict[str, Place],
        saved: Mapping[str, torch.dtype],
        placement: Placement,
        sums: FiniteSums | None = None,
        products: Sequence[TimedProducts] = (),
    ) -> None:
        """`models`: the ranks' models, in rank order; `products`: of the ranks' accelerators; the others are Pieces'
        arguments, for the whole model."""
        super().__init__(places, saved, placement, sums)
        self._of_ranks = []
        for rank, model in enumerate(models):
            own = places_on(model, rank)
            timed = products[rank] if products else TimedProducts()
            place = Placement(model.dtype, model.device, placement.invariant, timed)
            self._of_ranks.append((own, Pieces(own, saved, place), torch.device(model.device)))

    def room(self, name: str) -> Tensor:
        """Memory for a whole tensor, in its saved dtype."""
        return torch.empty(self._places[name].wanted.shape, dtype=self._saved[name], device=self._placement.device)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a whole tensor, and adds each rank's slice to the rank's pieces."""
        place = self._places[name]
        if self._sums is not None:
            self._sums.add(name, tensor)
        axes, summed, whole = axes_of(place), is_summed(place), is_read_whole(place)
        for rank, (own, pieces, device) in enumerate(self._of_ranks):
            if name in own and whole:
                pieces.add(name, tensor)
            elif name in own:
                given = torch.zeros_like(tensor) if summed and rank else tensor
                piece = cut(given, axes, rank, len(self._of_ranks))
                if device.type != "cpu" and piece.device == device and piece.numel() < tensor.numel():
                    piece = piece.clone()  # a device's parts take pieces over: a view would hold the whole tensor
                pieces.add(name, piece.to(device))
        self.pending[place.part] -= 1
        if not self.pending[place.part]:
            del self.pending[place.part]
            assert self.pending or not any(pieces.pending for _, pieces, _ in self._of_ranks)
