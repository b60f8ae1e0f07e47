"""Experts of an accelerator as they are saved, in the activations' dtype: moe/grouped multiplies by them.

Users: engine/layers/moe, on accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.moe.grouped import Tile, launch_grouped, tile_of
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
        tile = self._tile(pairs, gated=activation is not None)
        return launch_grouped(x, self.weight, self.bias, pairs, activation, tile, weights, of_tokens=True)

    def of_pairs(self, rows: Tensor, pairs: Pairs) -> Tensor:
        made = launch_grouped(rows, self.weight, self.bias, pairs, None, self._tile(pairs, gated=False))
        return made.view(len(pairs.chosen), pairs.top_k, -1)

    def _tile(self, pairs: Pairs, gated: bool) -> Tile:
        experts, rows, depth = self.weight.shape
        size, count = self.weight.element_size(), 0 if pairs.order is None else pairs.count
        count = SAME * experts if self.invariant else count
        shape = Shape(experts, rows // 2 if gated else rows, depth, gated)
        rule = partial(tile_of, target(), count, experts, gated, size)
        return tile_for("bfloat16", shape, count / experts, rule) if size == 2 else rule()


def pairs_of(chosen: Tensor, experts: int, invariant: bool) -> Pairs:
    """chosen [T, top_k]: few pairs as they are, where their tile may depend on their number."""
    few = chosen.numel() <= min(FEW, experts // 2) or len(chosen) == 1
    if few and not invariant:
        return Pairs(chosen.shape[1], chosen, None, None)
    return sort_pairs(chosen, experts)
