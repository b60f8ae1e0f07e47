"""Weight: a matrix in the form in which a device multiplies by it, and what a layer asks of every form.

Owner: the model; read only after loading. In: rows of activations. Out: products. A form is a class and a file:

    floats            panels (CPU), dense (accelerators), invariant (accelerators, --deterministic)
    codes             group_panels (CPU), group_weight (accelerators), float8_weight (FP8 that meets inputs in FP8)
    pieces of each    parts: matrices of unlike forms, one below the other
    with adapters     AdaptedWeight in engine/layers/adapted.py, around one of these

A form must know `linear`; it overrides the other products where it can fuse them. pack.py chooses the form; nothing
outside this folder asks which one a layer has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate_reference, glu
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.norm import rms_norm


class Weight(ABC):
    """W [out_features, in_features] and perhaps a bias; the weight of a gated layer has gate's rows, then up's."""

    __slots__ = ()

    takes_halves: ClassVar[bool] = False  # `of_halves` saves a launch over `glu` and `linear`

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What the form takes in memory."""

    @property
    def sums_in_two(self) -> bool:
        """Whether `linear` with a residual takes a pass more than without one."""
        return False

    @abstractmethod
    def dense(self) -> Tensor:
        """W itself, [out_features, in_features], a copy where the form is another."""

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

        A form may return those rows prescaled, for `of_normed`, which then needs no kernel for the norm.
        """
        self.linear(x, residual, residual)
        return None

    def of_normed(
        self, residual: Tensor, gain: Tensor, eps: float, prescaled: Unscaled | None, activation: Activation | None
    ) -> Tensor:
        """`linear`, with an activation `gated`, of rms_norm(residual, gain, eps), residual [M, in_features].

        `prescaled` is what `add_then_norm` returned with the same residual, gain and eps, if it came before.
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
    """In float64 when the tests hand over float64, otherwise in float32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    bias = weight.dense_bias()
    return torch.nn.functional.linear(x.to(wide), weight.dense().to(wide), None if bias is None else bias.to(wide))
