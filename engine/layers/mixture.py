"""Mixture: the results of the experts that each token chose, as an Addend (engine/layers/stream.py).

Thread: device. In: what SparseMLP computed (engine/layers/moe.py). The sum over a token's experts is computed when the
stream adds it, in one kernel with the shared MLP's result, the residual stream, and terms of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.moe.combine import Summands, combine, combine_then_norm
from engine.layers.adapted_experts import NormOf, Terms
from engine.layers.linear import Linear
from engine.layers.norm import Normed, RMSNorm


@dataclass(slots=True, eq=False)
class Mixture:
    """The experts' results of each token, not summed yet: an Addend."""

    made: Tensor  # [T, top_k, hidden]
    weights: Tensor | None  # [T, top_k] float32; None: the weights already multiplied the experts' inputs
    shared: Tensor | None  # [T, hidden]
    gate: Tensor | None  # [T, 1], of any dtype
    count: Tensor | None  # [1] int32: rows from here on are padding
    own: Tensor | None = None  # [T, top_k] int32: experts, of which this rank has those below `held`; None: all
    held: int = 0
    terms: Terms | None = None  # the adapters' terms, which `made` lacks

    def whole(self) -> Tensor:
        """`made` with the adapters' terms."""
        if self.terms is not None:
            self.terms.add_to(self.made)
            self.terms = None
        return self.made

    def value(self) -> Tensor:
        return self._combined(None)

    def add_to(self, residual: Tensor) -> None:
        self._combined(residual)

    def _combined(self, residual: Tensor | None) -> Tensor:
        if self.terms is not None:
            return self.terms.summed(self.made, self._summands(residual))[0]
        return combine(
            self.made, self.weights, self.shared, self.gate, residual, self.count, chosen=self.own, held=self.held
        )

    def add_then(self, residual: Tensor, norm: RMSNorm) -> Normed:
        assert self.own is None, "several ranks exchange their sums before the norm"
        if self.terms is not None:
            through = NormOf(norm.weight, norm.eps)
            return Normed(norm, residual, self.terms.summed(self.made, self._summands(residual), through)[1])
        summed = self.made, self.weights, self.shared, self.gate
        after = combine_then_norm(*summed, residual, norm.weight, norm.eps, self.count)
        return Normed(norm, residual, after)

    def _summands(self, residual: Tensor | None) -> Summands:
        assert self.own is None, "an engine with adapters by name has one rank"
        return Summands(self.weights, self.shared, self.gate, residual, self.count)


@dataclass(slots=True, eq=False)
class Latent:
    """linear(rows) + shared, an Addend."""

    linear: Linear
    rows: Tensor  # [T, latent]: what a token's experts made
    shared: Tensor | None  # [T, hidden]

    def value(self) -> Tensor:
        made = self.linear(self.rows)
        return made if self.shared is None else made.add_(self.shared)

    def add_to(self, residual: Tensor) -> None:
        if self.shared is not None:
            residual += self.shared
        self.linear.add_to(residual, self.rows)

    def add_then(self, residual: Tensor, norm: RMSNorm) -> Normed:
        if self.shared is not None:
            residual += self.shared
        return self.linear.add_then(norm, residual, self.rows)
