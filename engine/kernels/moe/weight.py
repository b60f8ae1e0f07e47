"""ExpertsWeight: the matrices of all experts of a layer, in the form that a device's products need.

Owner: the model; read-only after loading. In: tokens' rows and the experts that the tokens chose. Out: a row for each
(token, expert) pair. A form is a class and a file: panels (CPU); dense, coded and float8_weight
(accelerators).

    pairs       the experts that tokens chose -> pairs; the pairs of one expert are adjacent
    of_tokens   x [T, H] -> a row for each pair, pairs of one expert adjacent; with an activation of gate and up
    of_pairs    these rows -> [T, top_k, H], each token's experts in the order in which the token chose them
    of_mlp      of_tokens, then of_pairs; a form may fuse them; `inputs` is set if it accepts codes of x too
    of_mlp_and_shared  of_mlp and the shared expert's MLP in the same launches, if a form supports it
    of_ungated  the same for experts without a gate
    halves      gate and up of each pair before the activation, for layers with adapters (engine/layers/adapted_experts)
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from engine.kernels.activation import Activation, pointwise
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.quantise_floats import CodedRows
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.sort import Pairs


class ExpertsWeight(ABC):
    """W [E, out_features, in_features]; for a gated product gate's rows come first, then up's."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of this form."""

    @abstractmethod
    def dense(self, expert: int) -> Tensor:
        """Return an expert's matrix [out_features, in_features]; a copy if the form stores it differently."""

    @abstractmethod
    def pairs(self, chosen: Tensor) -> Pairs:
        """Return the order in which this form multiplies the pairs of chosen [T, top_k] int32."""

    @property
    def inputs(self) -> Inputs | None:
        """How inputs are quantised; None: inputs stay floats."""
        return None

    @abstractmethod
    def of_tokens(
        self, x: Tensor, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None
    ) -> Tensor:
        """x [T, in_features] -> activate(gate, up) [pairs, out_features / 2], pairs sorted by expert.

        activation: None: experts have no gate, and the result is the product, [pairs, out_features].
        weights, only with an activation: float32 [T, top_k]; each pair's input is multiplied by its weight; None: by 1.
        """

    @abstractmethod
    def of_pairs(self, rows: Tensor, pairs: Pairs) -> Tensor:
        """rows [pairs, in_features], sorted by expert -> [T, top_k, out_features]."""

    def lets_start(self, x: Tensor, pairs: Pairs) -> bool:
        """Whether the kernel of `halves` lets the next kernel start when the kernels before have ended, not earlier; so
        a kernel that reads x and the pairs alone can run during it."""
        return False

    def halves(self, x: Tensor, pairs: Pairs) -> Tensor:
        """x [T, in_features], or a row for each pair -> gate, then up, before the activation, [pairs, out_features] in
        the order of tokens; without a gate up alone."""
        each = 1 if len(x) == pairs.count else pairs.top_k
        if pairs.order is not None:
            rows = x.index_select(0, pairs.order.clamp(0, pairs.count - 1) // each)
        else:
            rows = x if each == 1 else x[:, None].expand(-1, each, -1).flatten(0, 1).contiguous()
        return self.of_pairs(rows, pairs).flatten(0, 1)

    def of_mlp(
        self, down: ExpertsWeight, x: Tensor, codes: CodedRows | None, pairs: Pairs, activation: Activation,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Apply this product, then `down`: x [T, in_features] -> [T, top_k, in_features]. codes: codes of x, if
        `inputs`."""
        return down.of_pairs(self.of_tokens(x, pairs, activation, weights), pairs)

    def of_mlp_and_shared(
        self, down: ExpertsWeight, shared: tuple[Weight, Weight], x: Tensor, codes: CodedRows | None, pairs: Pairs,
        activation: Activation,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """`of_mlp`, and the shared expert of these two matrices [T, in_features], together; None: not supported."""
        return None

    def of_ungated(self, down: ExpertsWeight, x: Tensor, pairs: Pairs, activation: Activation) -> Tensor:
        """`of_mlp` of experts without a gate: down(activation(x))."""
        return down.of_pairs(pointwise(self.of_tokens(x, pairs, None), activation), pairs)
