"""Merged: matrices to which the loader adds the product of an adapter (LoRA) that the checkpoint keeps beside them.

Owner: the thread that builds the model. In: matrices, and the adapter's two for some of them. Out: the Weight of
matrix + scale * B A. What is computed costs nothing more, and every token is computed with the adapter.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.checkpoint.section import Section
from engine.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.weight import Weight
from engine.quant.base import UNQUANTISED, Arrange, Expected, Tensors
from engine.weights.table import Shape, Wanted, parts_of

if TYPE_CHECKING:
    from engine.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a decoder, and what the checkpoint calls its tensors below the module's name."""

    modules: Collection[str]  # last components of the names of the matrices that it changes
    rank: int  # 0: it is left out
    scale: float
    base: str = "weight"
    halves: tuple[str, str] = ("lora_A.weight", "lora_B.weight")


@dataclass(frozen=True, slots=True)
class Merged:
    """The scheme of a layer."""

    adapter: Adapter
    ranks: tuple[int, ...]  # by piece; 0: the adapter leaves it as it is

    def expects(self, out_features: Shape, fold: Shape) -> Expected:
        pieces = list(zip(out_features, self.ranks))
        a, b = self.adapter.halves
        wanted: Expected = {self.adapter.base: tuple(Wanted((rows, *fold)) for rows in out_features)}
        if any(self.ranks):
            wanted[a] = tuple(Wanted((rank, *fold), merged=True) if rank else None for _, rank in pieces)
            wanted[b] = tuple(Wanted((rows, rank), merged=True) if rank else None for rows, rank in pieces)
        return wanted

    def weight(
        self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool, arrange: Arrange | None
    ) -> Weight:
        none = [None] * len(self.ranks)
        halves = (tensors.get(kind, none) for kind in self.adapter.halves)
        pieces = zip(tensors[self.adapter.base], *halves)
        merged: list[Tensor | None] = [self._sum(piece, a, b, placement) for piece, a, b in pieces]
        return UNQUANTISED.weight({"weight": merged}, bias, placement, gated, arrange)

    def _sum(self, piece: Tensor | None, a: Tensor | None, b: Tensor | None, placement: Placement) -> Tensor | None:
        """In float32, kept in the matrix's dtype."""
        if piece is None or a is None or b is None:
            return piece
        wide, a, b = (tensor.to(placement.device, torch.float32) for tensor in (piece, a, b))
        return torch.addmm(wide, b, a, alpha=self.adapter.scale).to(piece.dtype)


def merge(model: Decoder, adapter: Adapter) -> None:
    """Gives those linear layers of the decoder that the adapter changes their scheme."""
    part: Any
    for _, names, part in parts_of(model.table, model):
        ranks = tuple(adapter.rank if name.rpartition(".")[2] in adapter.modules else 0 for name in names)
        changed = any(name.rpartition(".")[2] in adapter.modules for name in names)
        if changed and names[0].startswith("layers.") and hasattr(part, "scheme"):
            part.scheme = Merged(adapter, ranks)


def read_adapter(section: Section) -> Adapter:
    """Of adapter_config.json, as PEFT writes it."""
    plain = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
    for key, needed in {**plain, "rank_pattern": {}, "alpha_pattern": {}}.items():
        given = section.values.get(key)
        if given is not None and given != needed:
            raise ConfigError(f"{section.path}: {key}={given!r}; an adapter is read with {needed!r}")
    modules = [str(name) for name in section.items("target_modules", ())]
    if not modules:
        raise ConfigError(f"{section.path}: target_modules must be a list of the matrices that the adapter changes")
    rank = section.size("r")
    return Adapter(frozenset(modules), rank, section.number("lora_alpha") / rank)
