"""Experts of an accelerator as they are saved, in the activations' dtype: moe/grouped or moe/grouped_persistent
multiplies by them, as moe/tiles has it.

Users: engine/layers/moe, on accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.moe.grouped import Tile, launch_grouped, tile_of
from engine.kernels.moe.grouped_persistent import persistent_product, takes
from engine.kernels.moe.sort import Pairs, sort_pairs
from engine.kernels.moe.tiles import Shape, tile_for
from engine.kernels.moe.weight import ExpertsWeight
from engine.kernels.target import target

FEW = 32  # pairs that are not sorted: the experts of so few pairs are nearly all different
SAME = 64  # pairs per expert for whose tile every product of an invariant form is cut


@dataclass(frozen=True, slots=True, eq=False)
class DenseExperts(ExpertsWeight):
    """The matrices of one layer."""

    weight: Tensor  # [E, out_features, in_features], contiguous
    bias: Tensor | None  # [E, out_features] of the weight's dtype
    invariant: bool  # a row has the same bits in any company: one tile for any number of pairs

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
        tile = self._tile(pairs, activation is not None, takes(x, self.weight))
        multiply = persistent_product if tile.persistent else launch_grouped
        return multiply(x, self.weight, self.bias, pairs, activation, tile, weights, of_tokens)

    def _tile(self, pairs: Pairs, gated: bool, described: bool) -> Tile:
        experts, rows, depth = self.weight.shape
        size, count = self.weight.element_size(), 0 if pairs.order is None else pairs.count
        count = SAME * experts if self.invariant else count
        shape = Shape(experts, rows // 2 if gated else rows, depth, gated)
        rule = partial(tile_of, target(), count, experts, gated, size)
        tile = tile_for("bfloat16", shape, count / experts, rule) if size == 2 else rule()
        return rule() if tile.persistent and not described else tile


def pairs_of(chosen: Tensor, experts: int, invariant: bool) -> Pairs:
    """chosen [T, top_k]: few pairs as they are, where their tile may depend on their number."""
    few = chosen.numel() <= min(FEW, experts // 2) or len(chosen) == 1
    if few and not invariant:
        return Pairs(chosen.shape[1], chosen, None, None)
    return sort_pairs(chosen, experts)
