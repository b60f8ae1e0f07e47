"""Experts of an accelerator with 4-bit or 8-bit codes; moe/dispatch_codes chooses the kernel.

The codes of all experts of a layer are one matrix [E * N, K], in the forms of gemm/groups. Users: engine/layers/moe,
on accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.groups import Packed
from engine.kernels.moe.dense import pairs_of
from engine.kernels.moe.dispatch_codes import Product, by_token, coded_product
from engine.kernels.moe.sort import Pairs
from engine.kernels.moe.weight import ExpertsWeight


@dataclass(frozen=True, slots=True, eq=False)
class CodedExperts(ExpertsWeight):
    """The codes of one layer."""

    weight: Packed  # [E * out_features, in_features]
    num_experts: int
    bias: Tensor | None  # [E, out_features] float32
    invariant: bool  # a row's bits do not depend on other rows: one tile for any number of pairs

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weight.tensors()) + (0 if self.bias is None else self.bias.nbytes)

    def dense(self, expert: int) -> Tensor:
        """A copy, float32."""
        return self.weight.dense().float().view(self.num_experts, -1, self.weight.depth)[expert]

    def pairs(self, chosen: Tensor) -> Pairs:
        return pairs_of(chosen, self.num_experts, self.invariant)

    def of_tokens(
        self, x: Tensor, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None
    ) -> Tensor:
        assert activation is not None, "experts without a gate are read as they are saved, never as codes"
        return coded_product(self._product(x, pairs, activation, weights))

    def of_pairs(self, rows: Tensor, pairs: Pairs) -> Tensor:
        made = coded_product(self._product(rows, pairs, None, first=False))
        return made.view(len(pairs.chosen), pairs.top_k, -1)

    def lets_start(self, x: Tensor, pairs: Pairs) -> bool:
        return by_token(x, self.weight, pairs)

    def halves(self, x: Tensor, pairs: Pairs) -> Tensor:
        if by_token(x, self.weight, pairs):
            return coded_product(self._product(x, pairs, None))
        return ExpertsWeight.halves(self, x, pairs)

    def _product(
        self,
        x: Tensor,
        pairs: Pairs,
        activation: Activation | None,
        weights: Tensor | None = None,
        first: bool = True,
    ) -> Product:
        of_weight = self.weight, self.num_experts, self.bias
        return Product(x, *of_weight, pairs, activation, weights, self.invariant, first=first)
