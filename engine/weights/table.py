"""The rows of a model's WEIGHTS, and their expansion into one place per checkpoint tensor.

A row says which modules of the checkpoint, joined in order, make a part of the model. `*` stands for a layer's index;
the model has the number of layers. `#` stands for an expert's number; the part has the number of experts, and may have
the number of the first. So a table holds no numbers. A part (engine/layers) knows its tensors and their shapes, so a
row names only modules; the part decides about biases and per-head norms.
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
    dtypes: tuple[torch.dtype, ...] = FLOATS  # allowed dtypes
    in_memory: torch.dtype | None = None  # dtype in memory; None: the default rule of num_bytes
    bytes_in_memory: int = 0  # bytes in memory, if codes take another size than in the file

    def num_bytes(self, activations: torch.dtype) -> int:
        """Bytes in memory: by default floats become the activations' dtype, and other dtypes do not change."""
        if self.bytes_in_memory:
            return self.bytes_in_memory
        in_memory = self.in_memory or (activations if self.dtypes == FLOATS else self.dtypes[0])
        return torch.Size(self.shape).numel() * in_memory.itemsize

    def saved_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of random weights for a checkpoint whose dtype is `dtype`."""
        return dtype if dtype in self.dtypes else self.dtypes[0]


class Part(Protocol):
    """The part of a layer object that the loader uses."""

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        """Tensor kind ("weight", "bias") -> the wanted tensor of each joined piece; None: the piece has no such
        tensor."""

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
    # Each prefix is stripped at most once, in this order; decoders inside models with towers occur with two orders.
    prefixes: tuple[str, ...] = ("model.", "language_model.", "model.")
    ignore: tuple[str, ...] = ()  # canonical names (shell patterns) of tensors that forward never reads
    spelled: tuple[tuple[str, str], ...] = ()  # (part of a name in some releases, its replacement)
    partial: bool = False  # the files hold other models' tensors too: ignored names are not logged

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
    """The part of a model (engine/models) that the loader uses."""

    config: ModelConfig
    dtype: torch.dtype  # the activations' dtype
    device: str

    def weight_table(self) -> Table:
        """The table for this checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where one checkpoint tensor goes: piece `index` of the `kind` tensor of a part."""

    part: Part
    kind: str
    index: int
    wanted: Wanted


def parts_of(table: Table, model: Any) -> Iterator[tuple[Row, list[str], Part]]:
    """(row, names of the checkpoint's modules, part), for every part that the table names."""
    for row in table.rows:
        for part, layers in _walk(model, row.target.split(".")):
            yield row, _of_experts([_number(name, layers) for name in row.names], part), part


def addressed(table: Table, model: Any) -> Iterator[tuple[str, list[str], Part]]:
    """(attribute path with numbers, names of the checkpoint's modules, part), for every part that the table names."""
    for row in table.rows:
        for part, layers in _walk(model, row.target.split(".")):
            yield _number(row.target, layers), _of_experts([_number(name, layers) for name in row.names], part), part


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
    """The parts at an attribute path, with the layer indices on the path. None ends the walk; a number is a list
    index."""
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


def _of_experts(names: list[str], part: Any) -> list[str]:
    """Names with `#` replaced for every expert: all names of the first expert, of the second, ..., one name per piece
    of the part."""
    if "#" not in names[0]:
        return names
    own = range(part.first, part.first + part.num_experts)
    return [name.replace("#", str(expert)) for expert in own for name in names]
