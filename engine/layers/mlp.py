"""GatedMLP: x += down(silu(gate(n)) * up(n)) with n = norm(x), gate and up as one product.

Thread: device. In: the residual stream [T, hidden] and the norm before the layer; the stream is changed in place by the
last product, so no kernel is spent on the sum.
"""

from __future__ import annotations

from torch import Tensor

from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import RMSNorm


class GatedMLP:
    """SwiGLU."""

    __slots__ = ("down", "gate_up")

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.gate_up = GatedLinear(hidden_size, intermediate_size, bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def add_to(self, residual: Tensor, norm: RMSNorm) -> None:
        self.down.add_to(residual, self.gate_up(norm(residual)))
