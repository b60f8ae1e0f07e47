"""Weight: the interface of all forms in which devices hold a matrix.

Owner: the model; read only after loading. In: rows of activations. Out: products. A form is a class and a file:

    floats            panels (CPU), dense (accelerators), invariant (accelerators, --deterministic)
    codes             group_panels (CPU), group_weight (accelerators), float8_weight (FP8 weights with FP8 inputs)
    mixed             parts: stacked matrices of different forms
    with adapters     AdaptedWeight in engine/layers/adapted.py, around one of these forms

A form must implement `linear`; it overrides the other products if it can fuse them. pack.py chooses the form; code
outside this folder does not depend on the form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate_reference, glu
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.norm import rms_norm


class Weight(ABC):
    """W [out_features, in_features] and optionally a bias; the weight of a gated layer has gate's rows, then up's."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the form in memory."""

    @property
    def plain(self) -> Weight | None:
        """The weight without adapters, if no row of this forward has one; else None."""
        return self

    @property
    def takes_halves(self) -> bool:
        """Whether `of_halves` saves a launch over `glu` and `linear`."""
        return False

    @property
    def sums_in_two(self) -> bool:
        """Whether `linear` needs an additional pass for a residual."""
        return False

    @abstractmethod
    def dense(self) -> Tensor:
        """W as a plain matrix [out_features, in_features]; a copy if the form is packed."""

    @abstractmethod
    def dense_bias(self) -> Tensor | None:
        """The bias, [out_features]."""

    @abstractmethod
    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x [..., in_features] -> x W^T + bias (+ residual) [..., out_features] of x's dtype.

        x is contiguous, or two-dimensional with contiguous rows. The result goes to `out` when given: contiguous, of
        the result's shape; `residual` has that shape too and may be `out` itself, which adds to `out` in place.
        """

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """x [..., in_features] -> activate(gate, up) of `linear`'s two halves, [..., out_features / 2]."""
        return glu(self.linear(x), activation)

    def of_halves(
        self, halves: Tensor, activation: Activation, out: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """`linear` of activate(gate, up); halves [M, 2 * in_features] are gate, then up."""
        return self.linear(glu(halves, activation), out, residual)

    def add_then_norm(self, residual: Tensor, x: Tensor, gain: Tensor, eps: float) -> Unscaled | None:
        """residual [M, N] += x W^T + bias, in place; the next product reads rms_norm(residual, gain, eps).

        A form may return the rows prescaled, for `of_normed`, which then needs no kernel for the norm.
        """
        self.linear(x, residual, residual)
        return None

    def of_normed(
        self, residual: Tensor, gain: Tensor, eps: float, prescaled: Unscaled | None, activation: Activation | None
    ) -> Tensor:
        """`linear`, with an activation `gated`, of rms_norm(residual, gain, eps), residual [M, in_features].

        `prescaled`: the result of a preceding `add_then_norm` with the same residual, gain and eps, or None.
        """
        rows = rms_norm(residual, gain, eps)
        return self.linear(rows) if activation is None else self.gated(rows, activation)


def rows_of(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] as rows [M, K]."""
    assert x.dtype is weight.dtype, f"x is {x.dtype}, the weights {weight.dtype}: load them as {x.dtype}"
    return x if x.dim() == 2 else x.reshape(-1, weight.shape[1])


def linear_reference(x: Tensor, weight: Weight, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    y = _product(x, weight)
    if residual is not None:
        y = y + residual
    return y.to(x.dtype) if out is None else out.copy_(y)


def gated_linear_reference(x: Tensor, weight: Weight, activation: Activation) -> Tensor:
    return activate_reference(_product(x, weight), activation).to(x.dtype)


def _product(x: Tensor, weight: Weight) -> Tensor:
    """The product, in float64 for float64 inputs (of tests), else in float32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    bias = weight.dense_bias()
    return torch.nn.functional.linear(x.to(wide), weight.dense().to(wide), None if bias is None else bias.to(wide))
