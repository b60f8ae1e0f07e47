"""Float8Weight: an FP8 weight of an accelerator whose inputs are quantised to FP8, as the checkpoint specifies.

One kernel quantises the inputs, fused with the preceding norm or gated activation if there is one. Then codes are
multiplied with codes, at every number of rows, so that a recomputed prefix is rounded alike. gemm/dispatch_float8
chooses the kernel. The kernel for one row of floats quantises the row itself. With further rows of floats it takes a
row that is prescaled for the norm, and rounds it before the division by the root mean square instead of after it.
Users: quantised layers on devices whose units multiply e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.dispatch_float8 import FLOAT8, INVARIANT, Product, choose
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.float8 import BLOCK
from engine.kernels.gemm.float8_library import blocks_of
from engine.kernels.gemm.float8_row import Floats, launch_float8_row_of_floats, takes_floats, takes_unscaled
from engine.kernels.gemm.groups import Packed, packed
from engine.kernels.gemm.quantise_floats import quantise_floats
from engine.kernels.gemm.scaled import ScaledProducts
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.weight import Weight

MAX_DEPTH = 4096  # columns of a row of floats, all of which a warp holds


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight(Weight):
    """The weight of one layer."""

    weight: Packed
    inputs: Inputs
    bias: Tensor | None  # [out_features] float32
    narrow: Tensor | None  # the bias in the activations' dtype, for the library
    products: ScaledProducts
    invariant: bool  # a row's bits do not depend on other rows

    @property
    def takes_halves(self) -> bool:
        return True

    @property
    def num_bytes(self) -> int:
        extra = [tensor for tensor in (self.bias, self.narrow) if tensor is not None]
        return sum(tensor.nbytes for tensor in (*self.weight.tensors(), *extra))

    def dense(self) -> Tensor:
        """A copy, float32."""
        return self.weight.dense().float()

    def dense_bias(self) -> Tensor | None:
        return self.bias

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """One launch for one row on most devices; else two, three if the library multiplies and there is a residual."""
        rows, width = x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), len(self.weight.codes)
        y = x.new_empty(len(rows), width) if out is None else out.view(-1, width)
        self._multiply(Floats(rows, self.inputs), None if residual is None else residual.view(-1, width), y)
        return y.view(*x.shape[:-1], width) if out is None else out

    def of_halves(
        self, halves: Tensor, activation: Activation, out: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """As `linear` of `glu`, with the same bits and no additional launch."""
        y = halves.new_empty(len(halves), len(self.weight.codes)) if out is None else out
        self._multiply(Floats(halves, self.inputs, activation=activation), residual, y)
        return y

    def of_normed(
        self, residual: Tensor, gain: Tensor, eps: float, prescaled: Unscaled | None, activation: Activation | None
    ) -> Tensor:
        y = residual.new_empty(len(residual), len(self.weight.codes))
        self._multiply(Floats(residual, self.inputs, gain, eps), None, y)  # quantised once, not in every program
        return y if activation is None else glu(y, activation)

    def of_normed_and(self, further: Tensor, prescaled: Unscaled | None) -> Tensor | None:
        """`of_normed` and the products of further weight rows [N, in_features] in one launch; None: not supported."""
        if prescaled is None or self.invariant or not takes_unscaled(self.inputs):
            return None
        floats = Floats(prescaled.rows, self.inputs, eps=prescaled.eps, squares=prescaled.squares)
        if not takes_floats(floats, self.weight) or further.dtype is not floats.x.dtype or further.shape[1] > MAX_DEPTH:
            return None
        y = floats.x.new_empty(1, len(self.weight.codes) + len(further))
        self.products.record(self.weight)
        launch_float8_row_of_floats(floats, self.weight, self.bias, None, y, further=further)
        return y

    def _multiply(self, floats: Floats, added: Tensor | None, y: Tensor) -> None:
        self.products.record(self.weight)
        if not self.invariant and takes_floats(floats, self.weight):
            launch_float8_row_of_floats(floats, self.weight, self.bias, added, y)
            return
        codes, scales = quantise_floats(*floats[:-1])
        product = Product(codes, scales, self.weight, self.bias, self.narrow, self.products.is_librarys)
        choose(INVARIANT if self.invariant else FLOAT8, product).launch(product, added, y)


def takes(codes: Codes) -> bool:
    """Whether codes and inputs have compatible scales: both per row, or both per 128 columns."""
    if codes.inputs is None or codes.inputs.kind is not Kind.E4M3 or codes.kind is not Kind.E4M3:
        return False
    if codes.scale.shape[1] == 1 and codes.inputs.group == 0:
        return True
    return codes.group == codes.inputs.group == BLOCK and codes.row_scale is None


def pack_float8(
    codes: Codes, bias: Tensor | None, dtype: torch.dtype, products: ScaledProducts, invariant: bool
) -> Float8Weight:
    """Makes the weight from canonical codes for which `takes` holds."""
    assert codes.inputs is not None
    if codes.values.is_cuda:
        arrivals(codes.values.device)  # allocated here, since a product may first run while a graph is captured
    wide = None if bias is None else bias.float()
    narrow = None if bias is None else bias.to(dtype)
    weight = packed(codes, words=False)
    if weight.scales is not None:
        weight = replace(weight, blocks=blocks_of(weight.scales))
    return Float8Weight(weight, codes.inputs, wide, narrow, products, invariant)
