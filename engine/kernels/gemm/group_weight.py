"""GroupWeight: the quantised weight of an accelerator, four or eight bits in memory.

Inputs are kept and codes widened to their dtype; where the checkpoint quantises inputs to int8, integers meet integers.
How inputs are treated depends on the checkpoint alone, never on the number of rows. Users: quantised layers on an
accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.gemm.codes import Codes, Inputs
from engine.kernels.gemm.groups import Packed, groups_product, packed, tile_of
from engine.kernels.gemm.quantise_rows import quantise_rows
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.weight import Weight
from engine.kernels.target import target


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeight(Weight):
    """The weight of one layer."""

    weight: Packed
    order: Tensor | None  # [in_features]: which column of x column k of the codes meets
    inputs: Inputs | None
    bias: Tensor | None  # [out_features] float32
    invariant: bool  # a row has the same bits in any company

    @property
    def num_bytes(self) -> int:
        extra = [tensor for tensor in (self.order, self.bias) if tensor is not None]
        return sum(tensor.nbytes for tensor in (*self.weight.tensors(), *extra))

    def dense(self) -> Tensor:
        """A copy, float32."""
        rows = self.weight.dense().float()
        return rows if self.order is None else rows[:, torch.argsort(self.order)]

    def dense_bias(self) -> Tensor | None:
        return self.bias

    def linear(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """One launch, with quantised inputs or another order of columns two."""
        rows, width = x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), len(self.weight.codes)
        y = x.new_empty(len(rows), width) if out is None else out.view(-1, width)
        added = None if residual is None else residual.view(-1, width)
        scales = None
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        if self.inputs is not None:
            rows, scales = quantise_rows(rows, self.inputs.scale)
        stages = 3 if target().loads_past_registers else 2
        tile = tile_of(None if self.invariant else len(rows), width, self.weight.depth, rows.itemsize, stages)
        groups_product(rows, self.weight, self.bias, added, y, scales, tile)
        return y.view(*x.shape[:-1], width) if out is None else out


def pack_groups(codes: Codes, bias: Tensor | None, invariant: bool) -> GroupWeight:
    """From the canonical form."""
    if codes.values.is_cuda:
        arrivals(codes.values.device)  # allocated here, since a product may first run while a graph is captured
    return GroupWeight(packed(codes), codes.order, codes.inputs, None if bias is None else bias.float(), invariant)
