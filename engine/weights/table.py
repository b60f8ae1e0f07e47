"""The rules of a model's WEIGHTS, and their expansion into one place per checkpoint tensor.

A row says: these modules of the checkpoint, joined in this order, make that part of the model. `*` stands for the index
of a layer and is counted on the model itself, `#` for the number of an expert and is counted on the part, so a table
holds no numbers. A part (engine/layers) knows which tensors it is made of and their shapes, so a row names modules
only: biases and per-head norms come and go with the part.
Names are canonical: prefixes that differ between releases (`model.`, `thinker.` ...) are stripped first.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.base.model_config import ModelConfig
from engine.kernels.gemm.pack import Placement

Shape = tuple[int, ...]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Wanted(NamedTuple):
    """A tensor of a checkpoint that a part needs."""

    shape: Shape
    dtypes: tuple[torch.dtype, ...] = FLOATS  # that it may have
    in_memory: torch.dtype | None = None  # in memory, where whoever reads it decides
    bytes_in_memory: int = 0  # in memory, where codes take another room than in the file

    def num_bytes(self, activations: torch.dtype) -> int:
        """In memory: floats of any width take the activations' dtype, others keep theirs."""
        if self.bytes_in_memory:
            return self.bytes_in_memory
        in_memory = self.in_memory or (activations if self.dtypes == FLOATS else self.dtypes[0])
        return torch.Size(self.shape).numel() * in_memory.itemsize

    def saved_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of random weights where the checkpoint's is `dtype`."""
        return dtype if dtype in self.dtypes else self.dtypes[0]


class Part(Protocol):
    """What the loader asks of a layer object."""

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        """Tensor kind ("weight", "bias") -> what each joined piece is; None where a piece has no such tensor."""

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        """Takes the pieces, in the row's order; the tensors may be views of a file."""


@dataclass(frozen=True, slots=True)
class Row:
    """Modules of the checkpoint, joined in order -> a part of the model (attribute path)."""

    names: tuple[str, ...]
    target: str
    split: Literal["rows", "columns"] | None = None  # how devices share each matrix; None: every device has all of it


@dataclass(frozen=True, slots=True)
class Table:
    """All rules of one architecture."""

    rows: tuple[Row, ...]
    # Each is stripped at most once, in this order; of decoders with towers around them there are two orders.
    prefixes: tuple[str, ...] = ("model.", "language_model.", "model.")
    ignore: tuple[str, ...] = ()  # canonical names (shell patterns) that files hold and forward never reads
    spelled: tuple[tuple[str, str], ...] = ()  # parts of names that some releases spell otherwise -> as rows have them

    def canonical(self, name: str) -> str:
        """A checkpoint's name without the prefixes that differ between releases."""
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        for found, ours in self.spelled:
            name = name.replace(found, ours)
        return name

    def ignored(self, name: str) -> bool:
        """Whether a canonical name may be left over."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)


class Weighted(Protocol):
    """What the loader asks of a model (engine/models)."""

    config: ModelConfig
    dtype: torch.dtype  # of activations
    device: str

    def weight_table(self) -> Table:
        """The rules of this checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where one checkpoint tensor goes: piece `index` of the `kind` tensor of a part."""

    part: Part
    kind: str
    index: int
    wanted: Wanted


def parts_of(table: Table, model: Any) -> Iterator[tuple[Row, list[str], Part]]:
    """Every part that a row of the table names, with the modules of the checkpoint that it is joined of."""
    for row in table.rows:
        for part, layers in _walk(model, row.target.split(".")):
            yield row, _of_experts([_number(name, layers) for name in row.names], part), part


def expand(table: Table, model: Any) -> dict[str, Place]:
    """Canonical tensor name -> place, for every tensor that this model needs."""
    places: dict[str, Place] = {}
    for row, names, part in parts_of(table, model):
        for kind, pieces in part.expects().items():
            assert len(pieces) == len(names), f"{row.target}: {len(names)} names for {len(pieces)} pieces"
            for index, (name, wanted) in enumerate(zip(names, pieces)):
                if wanted is not None:
                    full = f"{name}.{kind}" if name else kind  # "": the checkpoint itself holds the tensor
                    assert full not in places, f"two rows claim {full}"
                    places[full] = Place(part, kind, index, wanted)
    return places


def _walk(owner: Any, path: list[str], layers: tuple[int, ...] = ()) -> Iterator[tuple[Part, tuple[int, ...]]]:
    """Parts at an attribute path, with the layer indices met on the way; None ends the walk. A number names an item."""
    if owner is None:
        return
    if not path:
        yield owner, layers
    elif path[0] == "*":
        for index, item in enumerate(owner):
            yield from _walk(item, path[1:], (*layers, index))
    elif path[0].isdigit():
        yield from _walk(owner[int(path[0])], path[1:], layers)
    else:
        yield from _walk(getattr(owner, path[0]), path[1:], layers)


def _number(name: str, layers: tuple[int, ...]) -> str:
    for index in layers:
        name = name.replace("*", str(index), 1)
    return name


def _of_experts(names: list[str], part: Part) -> list[str]:
    """Names with `#` of every expert: those of expert 0, those of expert 1, ...; as many as the part has pieces."""
    if "#" not in names[0]:
        return names
    pieces = len(next(iter(part.expects().values())))
    return [name.replace("#", str(expert)) for expert in range(pieces // len(names)) for name in names]
