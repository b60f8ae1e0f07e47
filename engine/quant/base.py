"""Scheme: how a checkpoint stores the weight of a linear layer, and the Weight that is made of it.

Owner: the thread that builds the model. In: the tensors of a checkpoint, piece by piece. Out: a Weight. Layers, models
and steps use only the Weight. A dialect (a file of this folder) says how each module is Stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes
from engine.kernels.gemm.pack import Placement, pack, pack_gated, pack_pieces, stacked
from engine.kernels.gemm.weight import Weight
from engine.quant.checks import Checks, named
from engine.weights.files import TensorInfo
from engine.weights.table import Shape, Wanted

Tensors = dict[str, list[Tensor | None]]  # tensor kind -> one entry per joined piece, in order
Expected = dict[str, tuple[Wanted | None, ...]]  # tensor kind -> one entry per joined piece, in order
Arrange = Callable[[int, Tensor], Tensor]  # (number of a piece, its rows) -> the rows in the kernels' order


class Scheme(Protocol):
    """One way to store the matrices of a layer."""

    def expects(self, out_features: Shape, fold: Shape) -> Expected:
        """The tensors that store pieces [rows, *fold], rows from `out_features`; without the layer's "bias"."""

    def weight(
        self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool, arrange: Arrange | None
    ) -> Weight:
        """The Weight of the pieces, stacked along rows, with their bias [rows] float32; `gated`: pieces are gate and
        up."""


class Unquantised:
    """Matrices of floats, under "weight"."""

    def expects(self, out_features: Shape, fold: Shape) -> Expected:
        return {"weight": tuple(Wanted((rows, *fold)) for rows in out_features)}

    def weight(
        self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool, arrange: Arrange | None
    ) -> Weight:
        pieces = [piece for piece in tensors["weight"] if piece is not None]
        if arrange is not None:
            pieces = [_arranged(arrange(*piece), piece[1]) for piece in enumerate(pieces)]
        matrices = [piece.to(placement.device, weight_dtype(piece.dtype, placement)).flatten(1) for piece in pieces]
        if gated and bias is None:
            gate, up = matrices if len(matrices) == 2 else matrices[0].chunk(2)
            return pack_gated(gate, up, placement)
        return pack(stacked(matrices), bias, placement)


UNQUANTISED = Unquantised()


def _arranged(rows: Tensor, piece: Tensor) -> Tensor:
    """Permutes rows in place on CUDA, where pieces are contiguous and joining copies nothing. CPU pieces are
    read-only."""
    return piece.copy_(rows) if piece.is_cuda else rows


def weight_dtype(saved: torch.dtype, placement: Placement) -> torch.dtype:
    """The dtype of a matrix in memory. On an accelerator: the activations' dtype, as matrix libraries require.

    On a CPU bfloat16 stays bfloat16 (kernels widen it exactly); other dtypes become the activations' dtype.
    """
    return saved if saved == torch.bfloat16 and placement.device == "cpu" else placement.dtype


class Stored(Protocol):
    """How one quantised module is stored."""

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        """Tensor kind -> the wanted tensor; impossible shapes raise ConfigError."""

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes | Tensor:
        """The matrix as canonical Codes, or as floats [rows, columns] if it has no canonical form."""

    @property
    def form(self) -> str:
        """The form in memory, as text for the operator."""


Headers = Mapping[str, TensorInfo]  # tensor kind -> header entry, for one module


class Dialect(Protocol):
    """A quantisation method, which defines how each module is stored."""

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        """The module's storage; None: not quantised. `headers`: of the module's tensors; None: random weights."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """The scheme of a layer with at least one quantised piece."""

    pieces: tuple[Stored | None, ...]
    modules: tuple[str, ...]

    def expects(self, out_features: Shape, fold: Shape) -> Expected:
        columns = torch.Size(fold).numel()
        wanted = [
            {"weight": Wanted((rows, *fold))} if stored is None else _wants(stored, module, rows, columns)
            for stored, module, rows in zip(self.pieces, self.modules, out_features)
        ]
        kinds = dict.fromkeys(kind for piece in wanted for kind in piece)
        return {kind: tuple(piece.get(kind) for piece in wanted) for kind in kinds}

    def weight(
        self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool, arrange: Arrange | None
    ) -> Weight:
        matrices = self.matrices(tensors, placement)
        floats = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
        if len(floats) == len(matrices):
            return UNQUANTISED.weight({"weight": [*floats]}, bias, placement, gated, arrange)
        if arrange is not None:
            matrices = [_in_order(matrix, arrange, number) for number, matrix in enumerate(matrices)]
        return pack_pieces(matrices, bias, placement, gated)

    def matrices(self, tensors: Tensors, placement: Placement) -> list[Codes | Tensor]:
        """Each piece as canonical Codes, or as floats."""
        matrices: list[Codes | Tensor] = []
        with Checks(placement.device) as checks:
            for number, (stored, module) in enumerate(zip(self.pieces, self.modules)):
                given = {kind: piece for kind, pieces in tensors.items() if (piece := pieces[number]) is not None}
                if (spare := given.pop("bias", None)) is not None and spare.any():
                    raise ConfigError(f"{module}.bias is not zero, and this architecture has no bias there")
                matrices.append(_read(stored, module, given, placement, checks))
        return matrices


def _wants(stored: Stored, module: str, rows: int, columns: int) -> dict[str, Wanted]:
    with named(module):
        return stored.wants(rows, columns)


class OnDevice(Mapping[str, Tensor]):
    """Tensors by kind, each copied to a device when it is read: of a matrix that ranks share, the first rank reads."""

    def __init__(self, tensors: Mapping[str, Tensor], device: str) -> None:
        self._tensors = tensors
        self._device = device

    def __getitem__(self, kind: str) -> Tensor:
        return self._tensors[kind].to(self._device)

    def __contains__(self, kind: object) -> bool:
        return kind in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _read(
    stored: Stored | None, module: str, given: dict[str, Tensor], placement: Placement, checks: Checks
) -> Codes | Tensor:
    tensors = OnDevice(given, placement.device)
    if stored is None:
        weight = tensors["weight"]
        return weight.to(weight_dtype(weight.dtype, placement)).flatten(1)
    with checks.of(module):
        found = stored.read(tensors, checks)
    return found if isinstance(found, Codes) else found.to(weight_dtype(found.dtype, placement))


def _in_order(matrix: Codes | Tensor, arrange: Arrange, number: int) -> Codes | Tensor:
    if isinstance(matrix, Tensor):
        return arrange(number, matrix)
    index = torch.arange(len(matrix.values), device=matrix.values.device)
    return matrix.rows(arrange(number, index))
