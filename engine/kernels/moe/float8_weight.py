"""Float8Experts: FP8 experts of an accelerator whose inputs are quantised to FP8, as the checkpoint specifies.

Codes are multiplied with codes at every number of rows, so that a recomputed prefix has the same bits. If there is a
norm, its kernel also quantises the tokens' rows. The first product quantises the second product's inputs if a program
has all columns that share a scale. moe/dispatch_float8 chooses the kernel.
Users: engine/layers/moe, on devices whose units multiply e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.float8_weight import Float8Weight
from engine.kernels.gemm.groups import Packed
from engine.kernels.gemm.quantise_floats import CodedRows
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.dense import pairs_of
from engine.kernels.moe.dispatch_float8 import Product, choose
from engine.kernels.moe.pairs_float8 import joins, launch_pairs_float8, suits
from engine.kernels.moe.sort import Pairs, sort_pairs
from engine.kernels.moe.weight import ExpertsWeight
from engine.kernels.target import target


@dataclass(frozen=True, slots=True, eq=False)
class Float8Experts(ExpertsWeight):
    """The codes of one layer."""

    weight: Packed  # [E * out_features, in_features]
    takes: Inputs
    num_experts: int
    bias: Tensor | None  # [E, out_features] float32
    dtype: torch.dtype  # the results' dtype
    invariant: bool  # a row's bits do not depend on other rows: one tile for any number of pairs

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weight.tensors()) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def inputs(self) -> Inputs:
        return self.takes

    def dense(self, expert: int) -> Tensor:
        """A copy, float32."""
        return self.weight.dense().float().view(self.num_experts, -1, self.weight.depth)[expert]

    def pairs(self, chosen: Tensor) -> Pairs:
        if not suits(self.weight) or not target().runs_ptx or self.dtype is not torch.bfloat16:
            return sort_pairs(chosen, self.num_experts)
        return pairs_of(chosen, self.num_experts, self.invariant)

    def of_tokens(
        self, x: Tensor, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None
    ) -> Tensor:
        assert activation is not None, "experts without a gate are read as they are saved, never as codes"
        return floats(self._product(x, pairs, activation, weights))

    def of_pairs(self, rows: Tensor, pairs: Pairs) -> Tensor:
        return self._of_pairs(rows, pairs)

    def of_mlp(
        self, down: ExpertsWeight, x: Tensor, codes: CodedRows | None, pairs: Pairs, activation: Activation,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        made = self._product(x if codes is None else codes, pairs, activation, weights, down.inputs)
        return down._of_pairs(made, pairs) if isinstance(down, Float8Experts) else down.of_pairs(floats(made), pairs)

    def of_mlp_and_shared(
        self, down: ExpertsWeight, shared: tuple[Weight, Weight], x: Tensor, codes: CodedRows | None, pairs: Pairs,
        activation: Activation,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Few rows in two launches: the shared expert's matrices are read with those of the chosen experts."""
        if pairs.order is not None or not isinstance(down, Float8Experts) or self.invariant:
            return None
        first, second = shared
        if not (self._is_like(first) and down._is_like(second)):
            return None
        rows, count = x if codes is None else codes, pairs.count
        made = launch_pairs_float8(
            rows, self.weight, self.num_experts, None, pairs, activation, None, None, self.takes, self.dtype,
            first.weight,
        )  # fmt: skip
        made = launch_pairs_float8(
            made, down.weight, down.num_experts, None, pairs, None, None, None, down.takes, self.dtype, second.weight
        )
        return made[:count].view(len(x), pairs.top_k, -1), made[count:]

    def _is_like(self, alone: Weight) -> TypeGuard[Float8Weight]:
        """Whether the matrix of a shared expert, and how its inputs are quantised, match those of each expert here."""
        if not isinstance(alone, Float8Weight) or self.bias is not None or alone.bias is not None:
            return False
        forms = [(form.scale is None, form.group, form.powers) for form in (self.takes, alone.inputs)]
        return forms[0] == forms[1] and forms[0][0] and joins(self.weight, self.num_experts, alone.weight)

    def _of_pairs(self, rows: Tensor | CodedRows, pairs: Pairs) -> Tensor:
        return floats(self._product(rows, pairs, None)).view(len(pairs.chosen), pairs.top_k, -1)

    def _product(
        self, x: Tensor | CodedRows, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None,
        then: Inputs | None = None,
    ) -> Tensor | CodedRows:  # fmt: skip
        product = Product(
            x, self.weight, self.num_experts, self.bias, pairs, activation, self.takes, self.dtype, weights, then,
            self.invariant,
        )  # fmt: skip
        return choose(product).launch(product)


def floats(rows: Tensor | CodedRows) -> Tensor:
    """The float rows of a product for which codes were not requested."""
    assert isinstance(rows, Tensor)
    return rows
