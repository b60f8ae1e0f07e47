"""PlainMoE: a router and experts of two matrices each, without a gate; replaces an encoder's MLP.

    chosen, weights = route(x)          x [T, hidden]
    y = sum over k of weights[k] * down[chosen[k]](activate(up[chosen[k]](x))) + bias, which is added once

Thread: device. In: the output of attention's norm. Out: the term that the MLP's norm adds to it. The checkpoint stacks
all experts' matrices of a kind along the rows, with down transposed, as megablocks does
(https://github.com/databricks/megablocks). An encoder's steps have no padding rows.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from engine.base.dealing import Axis, Section
from engine.base.model_config import ExpertsConfig
from engine.kernels.activation import Activation, pointwise
from engine.kernels.gemm.pack import Placement
from engine.kernels.moe.combine import combine
from engine.kernels.moe.pack import pack_experts
from engine.kernels.moe.route import route
from engine.kernels.moe.weight import ExpertsWeight
from engine.layers.moe import PerExpert, Router
from engine.weights.table import Wanted


class PlainExperts:
    """w1 and w2 [E * width, hidden]: up of all experts, and down of all experts, transposed."""

    __slots__ = ("down", "num_experts", "rows", "shape", "up")

    up: ExpertsWeight
    down: ExpertsWeight

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        self.num_experts = num_experts
        self.shape = (num_experts * width, hidden)
        self.rows = ((Section(width, coarse=True),) * num_experts,)  # how ranks share each matrix

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {name: (Wanted(self.shape),) for name in ("w1", "w2")}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (first,), (second,) = pieces["w1"], pieces["w2"]
        assert first is not None
        assert second is not None
        ups, downs = (list(whole.unflatten(0, (self.num_experts, -1))) for whole in (first, second))
        self.up = pack_experts(ups, None, self.num_experts, placement, gated=False)
        self.down = pack_experts([matrix.T for matrix in downs], None, self.num_experts, placement, gated=False)


class SummedBias(PerExpert):
    """A single bias, which is added to the experts' sum, of several ranks' sums to the first rank's."""

    __slots__ = ()

    columns: ClassVar[Axis] = ()


class PlainMoE:
    """A mixture of experts; replaces an MLP of two linear layers."""

    __slots__ = ("activation", "bias", "matrices", "router", "routing")

    def __init__(self, hidden: int, config: ExpertsConfig, activation: Activation) -> None:
        self.routing, self.activation = config.routing, activation
        self.router = Router(hidden, config.routing.num_experts, biased=False)
        self.matrices = PlainExperts(config.routing.num_experts, config.width, hidden)
        self.bias = SummedBias("bias", hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        chosen, weights = route(x, self.router.weight, None, self.routing)
        pairs = self.matrices.up.pairs(chosen)
        inner = pointwise(self.matrices.up.of_tokens(x, pairs, None), self.activation)
        return combine(self.matrices.down.of_pairs(inner, pairs), weights, None, None, None).add_(self.bias.weight)
