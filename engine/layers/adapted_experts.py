"""AdaptedExperts: the matrices of all experts of a layer with adapters in places.

    halves[pair] = G_e x[token] + B (A x[token])      gate, then up, of the pair's expert e and the token's adapter
    made[pair]   = activate(gate, up)
    out[pair]    = D_e made[pair] + B (A made[pair])

Experts without a gate have up alone, and made[pair] = activate(up).

Thread: device. In: rows of a SparseMLP. Out: the experts' results. Pairs stay in the order of their tokens until the
base multiplies; the deltas need gate and up before the activation, so no product is fused while a row has an adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.activation import Activation, glu, pointwise
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.quantise_floats import CodedRows
from engine.kernels.moe.sort import Pairs
from engine.kernels.moe.weight import ExpertsWeight


class ExpertsDelta(ABC):
    """The adapters of one product of all experts."""

    __slots__ = ()

    @property
    @abstractmethod
    def acts(self) -> bool:
        """See engine/layers/adapted.Delta."""

    @property
    @abstractmethod
    def apart(self) -> bool:
        """See engine/layers/adapted.Delta."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the adapters' matrices."""

    def lowered(self, x: Tensor, pairs: Pairs) -> Tensor | None:
        """A x of each pair; x has a row for each token, or for each pair. See engine/layers/adapted.Delta."""
        return None

    @abstractmethod
    def add_to(self, y: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs) -> None:
        """Adds the adapters' terms to y [pairs, out_features], in place; low: of `lowered`."""

    def gated(self, halves: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs, activation: Activation) -> Tensor:
        """activate(gate, up) of halves [pairs, out_features] with the adapters' terms; may overwrite `halves`."""
        if self.acts:
            self.add_to(halves, x, low, pairs)
        return glu(halves, activation)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedExperts(ExpertsWeight):
    """Experts of any form with adapters. In a forward without adapters every product is the form's own."""

    base: ExpertsWeight
    site: ExpertsDelta

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes + self.site.num_bytes

    @property
    def inputs(self) -> Inputs | None:
        return None if self.site.apart else self.base.inputs

    def dense(self, expert: int) -> Tensor:
        """An expert's matrix, without adapters."""
        return self.base.dense(expert)

    def pairs(self, chosen: Tensor) -> Pairs:
        return self.base.pairs(chosen)

    def of_tokens(
        self, x: Tensor, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None
    ) -> Tensor:
        assert not self.site.apart, "products of rows with adapters have no order by expert"
        return self.base.of_tokens(x, pairs, activation, weights)

    def of_pairs(self, rows: Tensor, pairs: Pairs) -> Tensor:
        assert not self.site.apart, "products of rows with adapters have no order by expert"
        return self.base.of_pairs(rows, pairs)

    def of_mlp(
        self,
        down: ExpertsWeight,
        x: Tensor,
        codes: CodedRows | None,
        pairs: Pairs,
        activation: Activation,
        weights: Tensor | None,
    ) -> Tensor:
        assert isinstance(down, AdaptedExperts), "both products of a layer have places, or none"
        if not self.site.apart:
            return self.base.of_mlp(down.base, x, codes, pairs, activation, weights)
        if weights is not None:  # the inputs of pairs differ from the rows of tokens
            x = (x[:, None] * weights[..., None]).flatten(0, 1).to(x.dtype)
        low = self.site.lowered(x, pairs)
        return down._of_made(self.site.gated(self.base.halves(x, pairs), x, low, pairs, activation), pairs)

    def of_ungated(self, down: ExpertsWeight, x: Tensor, pairs: Pairs, activation: Activation) -> Tensor:
        assert isinstance(down, AdaptedExperts), "both products of a layer have places, or none"
        if not self.site.apart:
            return self.base.of_ungated(down.base, x, pairs, activation)
        low = self.site.lowered(x, pairs)
        made = self.base.halves(x, pairs)
        if self.site.acts:
            self.site.add_to(made, x, low, pairs)
        return down._of_made(pointwise(made, activation), pairs)

    def _of_made(self, made: Tensor, pairs: Pairs) -> Tensor:
        """The second product of made [pairs, in_features], in the order of tokens -> [T, top_k, out_features]."""
        low = self.site.lowered(made, pairs)
        out = self.base.of_pairs(made if pairs.order is None else made.index_select(0, in_order(pairs)), pairs)
        if self.site.acts:
            self.site.add_to(out.flatten(0, 1), made, low, pairs)
        return out


def in_order(pairs: Pairs) -> Tensor:
    """The sorted pairs' numbers; entries behind the last pair with an expert are some pair's number."""
    assert pairs.order is not None, "the pairs are not sorted"
    return pairs.order.clamp(0, pairs.count - 1)
