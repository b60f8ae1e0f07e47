"""GatedMLP: down(silu(gate(x)) * up(x)), gate and up as one product. Thread: device. [T, hidden] -> [T, hidden]."""

from __future__ import annotations

from torch import Tensor

from engine.layers.linear import GatedLinear, Linear


class GatedMLP:
    """SwiGLU."""

    __slots__ = ("down", "gate_up")

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.gate_up = GatedLinear(hidden_size, intermediate_size, bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))
