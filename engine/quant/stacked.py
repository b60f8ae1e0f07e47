"""Quantised experts of a layer in one tensor: the storage of one expert's matrix, stacked E times.

    gate_up_proj [E, K / 2, N]    gate_up_proj_weight_scale [E, K / 16, N]    gate_up_proj_weight_scale_2 []
    gate_up_proj_packed [E, N, K / 8]    gate_up_proj_scale [E, N, K / 32]
    gate_up_proj [E, K, N]    gate_up_proj_scale_inv [E, K / 128, N / 128]

ModelOpt writes Llama 4 and gpt-oss (NVFP4, FP8) in this way, compressed-tensors Gemma 4, and Qwen its Qwen3-VL in FP8.
Matrices are transposed if the family's float matrices are, and a matrix's scale may be shared by all experts. Owner:
the thread that builds the model. In: headers and tensors by their names below the layer's module. Out: one matrix of
Codes per expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes
from engine.kernels.gemm.pack import Placement
from engine.quant.base import Dialect, Headers, Stored
from engine.quant.checks import Checks, named
from engine.weights.files import DTYPES, TensorInfo
from engine.weights.table import FLOATS, Shape, Wanted

SHAPE = "weight_shape"  # a kind that stacked files lack
SHORT = ("packed", "scale", "scale_inv", "zero_point", "global_scale")  # kinds that lack the prefix "weight_"


@dataclass(frozen=True, slots=True)
class Stacked:
    """One matrix, gate_up or down, of all experts of a layer."""

    stored: Stored  # the storage of one expert's matrix
    module: str  # the layer's module with the matrix's name
    count: int  # number of experts
    turned: bool  # each matrix is transposed
    names: Mapping[str, str]  # tensor kind -> name below the layer's module
    shared: frozenset[str]  # tensor kinds that all experts share

    def expects(self, rows: int, columns: int) -> dict[str, tuple[Wanted | None, ...]]:
        """The tensors of the layer's module."""
        with named(self.module):
            wanted = self.stored.wants(rows, columns)
        product = self.module.rpartition(".")[2]
        return {
            self.names.get(kind, f"{product}_{kind}"): (
                each if kind in self.shared else each._replace(shape=(self.count, *self._turned(each.shape))),
            )
            for kind, each in wanted.items()
            if kind != SHAPE or kind in self.names
        }

    @property
    def shared_names(self) -> frozenset[str]:
        """Names, below the layer's module, of the tensors that all experts share."""
        product = self.module.rpartition(".")[2]
        return frozenset(self.names.get(kind, f"{product}_{kind}") for kind in self.shared)

    def matrices(self, pieces: Mapping[str, list[Tensor | None]], placement: Placement) -> list[Codes]:
        """Each expert's matrix, in the file's order of rows."""
        found = {kind: pieces[name][0] for kind, name in self.names.items() if name in pieces}
        whole = {kind: tensor.to(placement.device) for kind, tensor in found.items() if tensor is not None}
        with Checks(placement.device) as checks:
            return [self._read(number, whole, checks) for number in range(self.count)]

    def _turned(self, shape: Shape) -> Shape:
        return tuple(reversed(shape)) if self.turned else shape

    def _read(self, number: int, whole: Mapping[str, Tensor], checks: Checks) -> Codes:
        of_one = {kind: tensor if kind in self.shared else tensor[number] for kind, tensor in whole.items()}
        if self.turned:
            of_one = {kind: tensor.T.contiguous() if tensor.dim() == 2 else tensor for kind, tensor in of_one.items()}
        with checks.of(self.module):
            found = self.stored.read(of_one, checks)
        assert isinstance(found, Codes), "dialects that widen name each expert"
        return found


def made_codes(stored: Stored, matrices: Sequence[Codes | Tensor], device: str) -> list[Codes | Tensor]:
    """The codes of a layer's float matrices, which are quantised at load, on `device`."""
    floats = (matrix.to(device) for matrix in matrices if isinstance(matrix, Tensor))
    with Checks(device) as checks:
        return [stored.read({"weight": matrix.contiguous()}, checks) for matrix in floats]


class Experts(Protocol):
    """The part of a layer's experts that this module uses."""

    in_features: int
    num_experts: int

    @property
    def product(self) -> str:
        """The prefix of the tensors' names; "": this part cannot be stacked codes."""

    @property
    def is_turned(self) -> bool:
        """Whether each matrix is transposed."""


def stacked(part: Experts, dialect: Dialect, module: str, headers: Headers) -> Stacked | None:
    """The stacked storage that the headers of a layer's experts show; None: floats."""
    product, names, of_one, shared = part.product, {}, {}, set()
    if not product or (product in headers and DTYPES.get(headers[product].dtype) in FLOATS):
        return None
    for name, info in headers.items():
        kind = _kind(product, name)
        if kind is None or kind == "bias":
            continue
        names[kind] = name
        if torch.Size(info.shape).numel() == 1:
            of_one[kind] = info
            shared.add(kind)
        elif info.shape[0] == part.num_experts:
            rest = info.shape[1:]
            of_one[kind] = replace(info, shape=tuple(reversed(rest)) if part.is_turned else rest)
        else:
            raise ConfigError(
                f"{module}.{name} has shape {list(info.shape)}: one number, or a line for each of {part.num_experts} "
                "experts is read: fetch the files again"
            )
    module = f"{module}.{product}"
    of_one.setdefault(SHAPE, TensorInfo((2,), "I64", 16, 0))
    with named(module):
        found = dialect.stored(module, part.in_features, of_one)
    if found is None:
        return None
    return Stacked(found, module, part.num_experts, part.is_turned, names, frozenset(shared))


def _kind(product: str, name: str) -> str | None:
    """gate_up_proj -> "weight", gate_up_proj_weight_scale -> "weight_scale"; None: the name belongs to another
    matrix."""
    if name == product:
        return "weight"
    kind = name.removeprefix(f"{product}_")
    if kind == name:
        return None
    return f"weight_{kind}" if kind in SHORT else kind
