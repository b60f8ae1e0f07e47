"""Float experts of an accelerator, in the activations' dtype; moe/dispatch chooses the kernel.

Users: engine/layers/moe, on accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.moe.dispatch import Product, choose
from engine.kernels.moe.sort import Pairs, sort_pairs
from engine.kernels.moe.weight import ExpertsWeight

FEW = 32  # up to so many pairs are not sorted, because their experts are nearly all different


@dataclass(frozen=True, slots=True, eq=False)
class DenseExperts(ExpertsWeight):
    """The matrices of one layer."""

    weight: Tensor  # [E, out_features, in_features], contiguous
    bias: Tensor | None  # [E, out_features] of the weight's dtype
    invariant: bool  # a row's bits do not depend on other rows: one tile for any number of pairs

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dense(self, expert: int) -> Tensor:
        return self.weight[expert]

    def pairs(self, chosen: Tensor) -> Pairs:
        return pairs_of(chosen, len(self.weight), self.invariant)

    def of_tokens(
        self, x: Tensor, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None
    ) -> Tensor:
        return self._product(x, pairs, activation, weights, of_tokens=True)

    def of_pairs(self, rows: Tensor, pairs: Pairs) -> Tensor:
        return self._product(rows, pairs, None).view(len(pairs.chosen), pairs.top_k, -1)

    def _product(
        self, x: Tensor, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None,
        of_tokens: bool = False,
    ) -> Tensor:  # fmt: skip
        product = Product(x, self.weight, self.bias, pairs, activation, weights, of_tokens, self.invariant)
        kernel, tile = choose(product)
        return kernel.launch(x, self.weight, self.bias, pairs, activation, tile, weights, of_tokens)


def pairs_of(chosen: Tensor, experts: int, invariant: bool) -> Pairs:
    """The Pairs of chosen [T, top_k]; few pairs are not sorted, unless the list is invariant."""
    few = chosen.numel() <= min(FEW, experts // 2) or len(chosen) == 1
    if few and not invariant:
        return Pairs(chosen.shape[1], chosen, None, None)
    return sort_pairs(chosen, experts)
