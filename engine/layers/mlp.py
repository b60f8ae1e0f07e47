"""GatedMLP: down(activate(gate(n), up(n))) of n = norm(x), gate and up as one product.

Thread: device. In: the residual stream [T, hidden] through the norm before the MLP. Out: what the MLP adds to the
stream, whose last product is computed when it is added (engine/layers/stream.py).
"""

from __future__ import annotations

from engine.kernels.activation import Activation
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import Normed
from engine.layers.stream import Product


class GatedMLP:
    """SwiGLU, GeGLU and their like."""

    __slots__ = ("down", "gate_up")

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, activation: Activation) -> None:
        self.gate_up = GatedLinear(hidden_size, intermediate_size, bias, activation)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: Normed) -> Product:
        return Product(self.down, self.gate_up.of_normed(x))
