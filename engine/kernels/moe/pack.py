"""From the matrices of a checkpoint to the router's Weight and to an ExpertsWeight, in the form of their place.

Owner: the thread that builds the model. In: matrices as a file or the loader holds them. Out: panels on a CPU, copied
expert by expert; on an accelerator the matrices themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.pack import Placement, pack, pack_gated, stacked
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.dense import DenseExperts
from engine.kernels.moe.panels import ExpertPanels
from engine.kernels.moe.weight import ExpertsWeight


def pack_router(weight: Tensor, placement: Placement) -> Weight:
    """weight [E, H] of any float dtype: bfloat16 stays on an accelerator in bfloat16, all else is float32."""
    narrow = placement.device != "cpu" and weight.dtype == placement.dtype
    return pack(weight.to(placement.device, weight.dtype if narrow else torch.float32), None, placement)


def pack_experts(matrices: list[Tensor], num_experts: int, placement: Placement, gated: bool) -> ExpertsWeight:
    """matrices: one [E, N, K]; or [N, K] of each expert, `gated` of each expert gate's and up's."""
    if placement.device == "cpu":
        return _panels(matrices, num_experts, placement, gated)
    whole = stacked([matrix.to(placement.device, placement.dtype) for matrix in matrices])
    return DenseExperts(whole.view(num_experts, -1, whole.shape[-1]).contiguous(), placement.invariant)


def _panels(matrices: list[Tensor], num_experts: int, placement: Placement, gated: bool) -> ExpertPanels:
    each = len(matrices) // num_experts
    experts = []
    for number in range(num_experts):
        mine = [matrices[0][number]] if each == 0 else matrices[number * each : (number + 1) * each]
        mine = [piece.to(_kept(piece, placement)) for piece in mine]
        if gated:
            gate, up = mine if each else mine[0].chunk(2)
            experts.append(pack_gated(gate, up, placement))
        else:
            experts.append(pack(mine[0], None, placement))
    rows = mine[0].shape[0]
    return ExpertPanels(tuple(experts), rows // 2 if gated and not each else rows)


def _kept(piece: Tensor, placement: Placement) -> torch.dtype:
    """bfloat16 stays; other dtypes become the activations'."""
    return piece.dtype if piece.dtype == torch.bfloat16 else placement.dtype
