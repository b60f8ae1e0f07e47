"""From the matrices of a checkpoint to the router's Weight and to an ExpertsWeight, in the form of their place.

Owner: the thread that builds the model. In: matrices as a file or the loader holds them. Out: panels on a CPU, copied
expert by expert; on an accelerator the matrices themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.pack import Placement, pack, stacked
from engine.kernels.gemm.panels import pack_paired, pack_panels
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.dense import DenseExperts
from engine.kernels.moe.panels import ExpertPanels
from engine.kernels.moe.weight import ExpertsWeight


def pack_router(weight: Tensor, bias: Tensor | None, placement: Placement) -> Weight:
    """weight [E, H] of any float dtype: bfloat16 stays on an accelerator in bfloat16, all else is float32."""
    narrow = placement.device != "cpu" and weight.dtype == placement.dtype
    dtype = weight.dtype if narrow else torch.float32
    return pack(weight.to(placement.device, dtype), None if bias is None else bias.to(placement.device), placement)


def pack_experts(
    matrices: list[Tensor], biases: Tensor | None, num_experts: int, placement: Placement, gated: bool
) -> ExpertsWeight:
    """matrices: [N, K] of each expert, or `gated` gate's and up's, or both in one; biases [E, N], gate's first."""
    each = len(matrices) // num_experts
    if placement.device != "cpu":
        whole = stacked([matrix.to(placement.device, placement.dtype) for matrix in matrices])
        whole = whole.contiguous().view(num_experts, -1, whole.shape[-1])
        narrow = None if biases is None else biases.to(placement.device, placement.dtype).contiguous()
        return DenseExperts(whole, narrow, placement.invariant)
    experts = []
    for number in range(num_experts):
        mine = matrices[number * each : (number + 1) * each]
        mine = [piece if piece.dtype == torch.bfloat16 else piece.to(placement.dtype) for piece in mine]
        bias = None if biases is None else biases[number]
        if gated:
            both = torch.stack(mine if each == 2 else list(mine[0].chunk(2)))
            experts.append(pack_paired(both, None if bias is None else bias.view(2, -1)))
        else:
            experts.append(pack_panels(mine[0], bias))
    return ExpertPanels(tuple(experts), experts[0].out_features // (2 if gated else 1))
