"""Bare: a tensor of a checkpoint that is not a module's weight or bias: a class token, a scale, a separator.

Owner: the model; read only after loading.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.gemm.pack import Placement
from engine.weights.table import Wanted


class Bare:
    """A bare tensor; `kind`: the last component of its name in the checkpoint."""

    __slots__ = ("kind", "shape", "value")

    value: Tensor  # [shape], in the activations' dtype

    def __init__(self, kind: str, *shape: int) -> None:
        self.kind = kind
        self.shape = shape

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {self.kind: (Wanted(self.shape),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces[self.kind]
        assert piece is not None
        self.value = piece.to(placement.device, placement.dtype, copy=piece.is_cpu)
