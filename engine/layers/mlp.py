"""GatedMLP and PlainMLP: the MLPs of decoder layers.

    gated:  down(activate(gate(n), up(n))), gate and up as one product        plain:  down(activate(up(n)))

If both products quantise their inputs, the kernel that quantises down's input also applies the activation.

Thread: device. In: n, the residual stream [T, hidden] through the norm before the MLP. Out: an Addend, whose last
product is computed when the stream adds it (engine/layers/stream.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engine.base.dealing import width
from engine.base.model_config import TextConfig
from engine.kernels.activation import BY_NAME, Activation, pointwise
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import Normed, RMSNorm
from engine.layers.stream import Addend, Product


@dataclass(slots=True, eq=False)
class HalvesProduct:
    """activate(gate, up) W^T + b, an Addend."""

    linear: Linear
    halves: Tensor  # [T, 2 * in_features]: gate, then up
    activation: Activation

    def value(self) -> Tensor:
        return self.linear.weight.of_halves(self.halves, self.activation)

    def add_to(self, residual: Tensor) -> None:
        self.linear.weight.of_halves(self.halves, self.activation, residual, residual)

    def add_then(self, residual: Tensor, norm: RMSNorm) -> Normed:
        self.add_to(residual)
        return Normed(norm, residual)


class GatedMLP:
    """A gated MLP (SwiGLU, GeGLU); `joined`: the checkpoint has gate and up in one matrix."""

    __slots__ = ("down", "gate_up")

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, activation: Activation, joined: bool = False
    ) -> None:
        self.gate_up = GatedLinear(hidden_size, intermediate_size, bias, activation, joined)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)
        self.down.columns = (width(intermediate_size),)

    def __call__(self, x: Normed) -> Addend:
        if self.gate_up.weight.takes_halves and self.down.weight.takes_halves:
            return HalvesProduct(self.down, self.gate_up.halves_of_normed(x), self.gate_up.activation)
        return Product(self.down, self.gate_up.of_normed(x))

    def of_rows(self, rows: Tensor) -> Tensor:
        """Normed rows [T, hidden] -> a new [T, hidden]."""
        if self.gate_up.weight.takes_halves and self.down.weight.takes_halves:
            return HalvesProduct(self.down, self.gate_up.weight.linear(rows), self.gate_up.activation).value()
        return self.down(self.gate_up(rows))


class PlainMLP:
    """An MLP without a gate: two linear layers with an activation between them."""

    __slots__ = ("activate", "down", "up")

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, activate: Callable[[Tensor], Tensor]
    ) -> None:
        self.up = Linear(hidden_size, intermediate_size, bias=bias)
        self.activate = activate
        self.down = Linear(intermediate_size, hidden_size, bias=bias)
        self.up.rows = ((width(intermediate_size),),)
        self.down.columns = (width(intermediate_size),)

    def __call__(self, x: Normed) -> Product:
        return Product(self.down, self.activate(self.up.of_normed(x)))

    def of_rows(self, rows: Tensor) -> Tensor:
        """rows [T, hidden], normed before -> a new [T, hidden]."""
        return self.down(self.activate(self.up(rows)))


def decoder_mlp(text: TextConfig) -> GatedMLP | PlainMLP:
    """The MLP that a configuration describes."""
    return mlp_of_width(text, text.intermediate_size)


def mlp_of_width(text: TextConfig, width: int) -> GatedMLP | PlainMLP:
    """The same with an intermediate size of its own."""
    activation = BY_NAME[text.activation]
    sizes = text.hidden_size, width, text.mlp_bias
    if text.gated_mlp:
        return GatedMLP(*sizes, activation, text.joined_mlp)
    return PlainMLP(*sizes, partial(pointwise, activation=activation))
