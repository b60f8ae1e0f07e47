"""A toy form of weight, in this one file: int8 codes and a float32 scale per row, multiplied in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.weight import Weight, linear_reference
from engine.quant.base import Tensors
from engine.weights.table import Shape, Wanted


@dataclass(frozen=True, slots=True, eq=False)
class ToyInt8Weight(Weight):
    """w[n, k] = codes[n, k] * scale[n]."""

    codes: Tensor  # [out_features, in_features] int8
    scale: Tensor  # [out_features] float32
    bias: Tensor | None  # [out_features] float32

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dense(self) -> Tensor:
        return self.codes * self.scale[:, None]

    def dense_bias(self) -> Tensor | None:
        return self.bias

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return linear_reference(x, self, out, residual)


class ToyInt8:
    """The scheme: "weight" holds the codes, "weight_scale" the scales."""

    def wants(self, rows: int, fold: Shape) -> dict[str, Wanted]:
        return {"weight": Wanted((rows, *fold), (torch.int8,)), "weight_scale": Wanted((rows,))}

    def weight(self, tensors: Tensors, bias: Tensor | None, placement: Placement, gated: bool) -> Weight:
        codes, scale = torch.cat(tensors["weight"]), torch.cat(tensors["weight_scale"])
        return ToyInt8Weight(codes.to(placement.device), scale.to(placement.device, torch.float32), bias)


SCHEME = ToyInt8()


def dialect(module: str, _settings: object) -> ToyInt8 | None:
    """The head is kept in floats, as usual."""
    return None if module == "lm_head" else SCHEME


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix."""
    scale = weight.float().abs().amax(1) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale
