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
from typing import NamedTuple

from torch import Tensor

from engine.kernels.activation import Activation, glu, pointwise
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.quantise_floats import CodedRows
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.combine import Summands, combine, combine_then_norm
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

    def lowered(self, x: Tensor, pairs: Pairs, during: bool = False) -> Tensor | None:
        """A x of each pair; x has a row for each token, or for each pair. See engine/layers/adapted.Delta. `during`:
        launched behind the layer's own product, with which it may run; see ExpertsWeight.lets_start."""
        return None

    @abstractmethod
    def add_to(self, y: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs) -> None:
        """Adds the adapters' terms to y [pairs, out_features], in place; low: of `lowered`."""

    def gated(
        self, halves: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs, activation: Activation, down: ExpertsDelta
    ) -> tuple[Tensor, Tensor | None]:
        """activate(gate, up) of halves [pairs, out_features] with the adapters' terms, and `lowered` of it by `down`,
        the adapters of the next product; may overwrite `halves`."""
        if self.acts:
            self.add_to(halves, x, low, pairs)
        made = glu(halves, activation)
        return made, down.lowered(made, pairs)

    def summed(
        self, made: Tensor, x: Tensor, low: Tensor | None, pairs: Pairs, sum_of: Summands, norm: NormOf | None
    ) -> tuple[Tensor, Unscaled | None]:
        """`add_to` made [T, top_k, out_features], which may be overwritten, and the sum of each token's experts
        (kernels/moe/combine); with a norm of the sum, its prescaled rows if they are few."""
        self.add_to(made.flatten(0, 1), x, low, pairs)
        weights, shared, gate, residual, count = sum_of
        if norm is None:
            return combine(made, weights, shared, gate, residual, count), None
        assert residual is not None, "a norm of the residual stream"
        return residual, combine_then_norm(made, weights, shared, gate, residual, *norm, count)


class NormOf(NamedTuple):
    """The norm that a product reads."""

    gain: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The adapters' terms of the second product, which are added with the sum of each token's experts."""

    site: ExpertsDelta
    x: Tensor  # [pairs, in_features]
    low: Tensor | None  # `lowered` of x
    pairs: Pairs

    def add_to(self, made: Tensor) -> None:
        """Adds them to made [T, top_k, out_features], in place."""
        self.site.add_to(made.flatten(0, 1), self.x, self.low, self.pairs)

    def summed(self, made: Tensor, sum_of: Summands, norm: NormOf | None = None) -> tuple[Tensor, Unscaled | None]:
        """See ExpertsDelta."""
        return self.site.summed(made, self.x, self.low, self.pairs, sum_of, norm)


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
        made, terms = self.apart(down, x, pairs, activation, weights, gated=True)
        if terms is not None:
            terms.add_to(made)
        return made

    def of_mlp_and_shared(
        self,
        down: ExpertsWeight,
        shared: tuple[Weight, Weight],
        x: Tensor,
        codes: CodedRows | None,
        pairs: Pairs,
        activation: Activation,
    ) -> tuple[Tensor, Tensor] | None:
        assert isinstance(down, AdaptedExperts), "both products of a layer have places, or none"
        if self.site.apart:
            return None
        return self.base.of_mlp_and_shared(down.base, shared, x, codes, pairs, activation)

    def of_ungated(self, down: ExpertsWeight, x: Tensor, pairs: Pairs, activation: Activation) -> Tensor:
        assert isinstance(down, AdaptedExperts), "both products of a layer have places, or none"
        if not self.site.apart:
            return self.base.of_ungated(down.base, x, pairs, activation)
        made, terms = self.apart(down, x, pairs, activation, None, gated=False)
        if terms is not None:
            terms.add_to(made)
        return made

    def apart(
        self, down: AdaptedExperts, x: Tensor, pairs: Pairs, activation: Activation, weights: Tensor | None, gated: bool
    ) -> tuple[Tensor, Terms | None]:
        """of_mlp, or of_ungated, without the adapters' terms of the second product, and these; None: no row has an
        adapter."""
        if weights is not None:  # the inputs of pairs differ from the rows of tokens
            x = (x[:, None] * weights[..., None]).flatten(0, 1).to(x.dtype)
        during = self.base.lets_start(x, pairs)
        low = None if during else self.site.lowered(x, pairs)
        made = self.base.halves(x, pairs)
        if during:
            low = self.site.lowered(x, pairs, during)
        if gated:
            made, low = self.site.gated(made, x, low, pairs, activation, down.site)
        else:
            if self.site.acts:
                self.site.add_to(made, x, low, pairs)
            made = pointwise(made, activation)
            low = down.site.lowered(made, pairs)
        out = down.base.of_pairs(made if pairs.order is None else made.index_select(0, in_order(pairs)), pairs)
        return out, Terms(down.site, made, low, pairs) if self.site.acts else None


def in_order(pairs: Pairs) -> Tensor:
    """The sorted pairs' numbers; entries behind the last pair with an expert are some pair's number."""
    assert pairs.order is not None, "the pairs are not sorted"
    return pairs.order.clamp(0, pairs.count - 1)
