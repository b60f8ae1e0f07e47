"""GatedMLP: x += down(silu(gate(n)) * up(n)) with n = norm(x), gate and up as one product.

Thread: device. In: the residual stream [T, hidden] through the norm before the layer, and the norm after it. Out: the
stream, changed in place by the last product, through that norm.
"""

from __future__ import annotations

from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import Normed, RMSNorm


class GatedMLP:
    """SwiGLU."""

    __slots__ = ("down", "gate_up")

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self.gate_up = GatedLinear(hidden_size, intermediate_size, bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: Normed, after: RMSNorm) -> Normed:
        return self.down.add_then(after, x.residual, self.gate_up.of_normed(x))
