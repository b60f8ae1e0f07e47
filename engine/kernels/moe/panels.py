"""Experts of a CPU: each expert has its own panels (gemm/panels), which multiply the rows that chose the expert.

A row's bits depend only on the row and the expert, as in gemm/panels. Users: engine/layers/moe, on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.sort import Pairs, sort_pairs
from engine.kernels.moe.weight import ExpertsWeight


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPanels(ExpertsWeight):
    """One Weight per expert."""

    experts: tuple[Weight, ...]
    out_features: int  # columns of a product; if gated, half of the matrix's rows
    gated: bool

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.experts)

    def dense(self, expert: int) -> Tensor:
        return self.experts[expert].dense()

    def pairs(self, chosen: Tensor) -> Pairs:
        return sort_pairs(chosen, len(self.experts))

    def of_tokens(
        self, x: Tensor, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None
    ) -> Tensor:
        assert pairs.order is not None
        rows = x.index_select(0, pairs.order // pairs.top_k)
        if weights is not None:
            rows = (rows * weights.flatten()[pairs.order, None]).to(x.dtype)
        out = x.new_empty(len(rows), self.out_features)
        for weight, mine in self._each(pairs):
            if activation is None:
                weight.linear(rows[mine], out[mine])
            else:
                out[mine] = weight.gated(rows[mine], activation)
        return out

    def halves(self, x: Tensor, pairs: Pairs) -> Tensor:
        assert pairs.order is not None
        rows = x.index_select(0, pairs.order // (1 if len(x) == pairs.count else pairs.top_k))
        out = x.new_empty(len(rows), self.out_features * (2 if self.gated else 1))
        for weight, mine in self._each(pairs):
            weight.linear(rows[mine], out[mine])
        return out.new_empty(out.shape).index_copy_(0, pairs.order, out)

    def of_pairs(self, rows: Tensor, pairs: Pairs) -> Tensor:
        assert pairs.order is not None
        out = rows.new_empty(len(rows), self.out_features)
        for weight, mine in self._each(pairs):
            weight.linear(rows[mine], out[mine])
        by_pair = out.new_empty(out.shape).index_copy_(0, pairs.order, out)
        return by_pair.view(len(rows) // pairs.top_k, pairs.top_k, self.out_features)

    def _each(self, pairs: Pairs) -> Iterator[tuple[Weight, slice]]:
        """Yield the experts that tokens chose, each with the slice of its rows."""
        assert pairs.ends is not None
        start = 0
        for weight, end in zip(self.experts, pairs.ends.tolist()):
            if end > start:
                yield weight, slice(start, end)
            start = end
