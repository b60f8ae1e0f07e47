"""Codes of all experts of a layer in one tensor: what a dialect says of one expert's matrix, E times.

    gate_up_proj [E, K / 2, N]    gate_up_proj_weight_scale [E, K / 16, N]    gate_up_proj_weight_scale_2 []

As ModelOpt writes Llama 4 and gpt-oss (NVFP4, FP8): matrices are transposed, as the floats of these families are, and a
number for a matrix may be one for all experts. Owner: the thread that builds the model. In: headers and tensors by
their names below the layer's module. Out: one matrix of Codes an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.gemm.codes import Codes
from engine.kernels.gemm.pack import Placement
from engine.quant.base import Dialect, Headers, Stored, named
from engine.weights.files import DTYPES
from engine.weights.table import FLOATS, Wanted


@dataclass(frozen=True, slots=True)
class Stacked:
    """One product of all experts of a layer."""

    stored: Stored  # of one expert's matrix
    module: str  # with the product's name
    count: int  # of experts
    shared: frozenset[str]  # tensor kinds that all experts have in common

    def expects(self, product: str, rows: int, columns: int) -> dict[str, tuple[Wanted | None, ...]]:
        """`product` begins the tensors' names."""
        with named(self.module):
            wanted = self.stored.wants(rows, columns)
        return {_name(product, kind): (self._of_all(kind, each),) for kind, each in wanted.items()}

    def _of_all(self, kind: str, wanted: Wanted) -> Wanted:
        if kind in self.shared:
            return wanted
        return wanted._replace(shape=(self.count, *reversed(wanted.shape)))

    def matrices(self, product: str, pieces: Mapping[str, list[Tensor | None]], placement: Placement) -> list[Codes]:
        """That of each expert, rows as the file has its columns."""
        given = {kind: pieces[_name(product, kind)][0] for kind in self._kinds(product, pieces)}
        whole = {kind: tensor.to(placement.device) for kind, tensor in given.items() if tensor is not None}
        return [self._read(number, whole) for number in range(self.count)]

    def _kinds(self, product: str, names: Mapping[str, object]) -> Iterator[str]:
        return (kind for name in names if (kind := _kind(product, name)) is not None and kind != "bias")

    def _read(self, number: int, whole: Mapping[str, Tensor]) -> Codes:
        of_one = {
            kind: tensor if kind in self.shared else tensor[number].T.contiguous() for kind, tensor in whole.items()
        }
        with named(self.module):
            found = self.stored.read(of_one)
        assert isinstance(found, Codes), "dialects that widen name each expert"
        return found


class Experts(Protocol):
    """What is asked of a layer's product of all experts."""

    in_features: int
    num_experts: int

    @property
    def product(self) -> str:
        """How its tensors' names begin; "": its codes cannot lie so."""


def stacked(part: Experts, dialect: Dialect, module: str, headers: Headers) -> Stacked | None:
    """What the headers of a layer's experts say of this product; None: floats."""
    product, of_one, shared = part.product, {}, set()
    if not product or product not in headers or DTYPES.get(headers[product].dtype) in FLOATS:
        return None
    for name, info in headers.items():
        kind = _kind(product, name)
        if kind is None or kind == "bias":
            continue
        if torch.Size(info.shape).numel() == 1:
            of_one[kind] = info
            shared.add(kind)
        elif info.shape[0] == part.num_experts:
            of_one[kind] = replace(info, shape=tuple(reversed(info.shape[1:])))
        else:
            raise ConfigError(
                f"{module}.{name} has shape {list(info.shape)}: one number, or a line for each of {part.num_experts} "
                "experts is read: fetch the files again"
            )
    module = f"{module}.{product}"
    with named(module):
        found = dialect.stored(module, part.in_features, of_one)
    return None if found is None else Stacked(found, module, part.num_experts, frozenset(shared))


def _name(product: str, kind: str) -> str:
    return product if kind == "weight" else f"{product}_{kind}"


def _kind(product: str, name: str) -> str | None:
    """gate_up_proj is its "weight", gate_up_proj_weight_scale its "weight_scale"; None: of another product."""
    if name == product:
        return "weight"
    return name.removeprefix(f"{product}_") if name.startswith(f"{product}_") else None
