"""ExpertsWeight: the matrices of all experts of a layer, in the form in which a device multiplies by them.

Owner: the model; read only after loading. In: the rows of tokens and the experts that the tokens chose. Out: a row for
each pair of a token and an expert. A form is a class and a file: panels (CPU); dense, coded and float8_weight
(accelerators).

    pairs       the experts that tokens chose -> pairs, side by side where one expert has several
    of_tokens   x [T, H] -> a row for each pair, pairs of one expert side by side; with an activation of gate and up
    of_pairs    these rows -> [T, top_k, H], each token's experts in the order in which the token chose them
    of_mlp      one behind the other, which forms may join; `inputs` says whether it takes codes of x too
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Inputs
from engine.kernels.gemm.quantise_floats import CodedRows
from engine.kernels.moe.sort import Pairs


class ExpertsWeight(ABC):
    """W [E, out_features, in_features]; of a gated product gate's rows, then up's."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What the form takes in memory."""

    @abstractmethod
    def dense(self, expert: int) -> Tensor:
        """The matrix of an expert, [out_features, in_features], a copy where the form is another."""

    @abstractmethod
    def pairs(self, chosen: Tensor) -> Pairs:
        """chosen [T, top_k] int32 -> the order in which this form multiplies the pairs."""

    @property
    def inputs(self) -> Inputs | None:
        """How what is multiplied becomes codes; None: it stays in floats."""
        return None

    @abstractmethod
    def of_tokens(
        self, x: Tensor, pairs: Pairs, activation: Activation | None, weights: Tensor | None = None
    ) -> Tensor:
        """x [T, in_features] -> activate(gate, up) [pairs, out_features / 2], pairs sorted by expert.

        activation: None: experts have no gate, and the result is the product, [pairs, out_features].
        weights, with an activation alone: float32 [T, top_k], by which each pair's input is multiplied; None: the input
        stays.
        """

    @abstractmethod
    def of_pairs(self, rows: Tensor, pairs: Pairs) -> Tensor:
        """rows [pairs, in_features], sorted by expert -> [T, top_k, out_features]."""

    def of_mlp(
        self, down: ExpertsWeight, x: Tensor, codes: CodedRows | None, pairs: Pairs, activation: Activation,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """x [T, in_features] through this product and `down`: [T, top_k, in_features]; codes: of x, where `inputs`."""
        return down.of_pairs(self.of_tokens(x, pairs, activation, weights), pairs)
