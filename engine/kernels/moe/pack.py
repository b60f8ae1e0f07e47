"""Packs matrices of a checkpoint as the router's Weight and as an ExpertsWeight, in the form that the device needs.

Owner: the thread that builds the model. In: matrices from a file or from the loader. Out: on a CPU panels, copied
expert by expert; on an accelerator the matrices themselves, or one matrix with all experts' codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import Codes, alike, joined
from engine.kernels.gemm.float8_weight import takes
from engine.kernels.gemm.groups import packed
from engine.kernels.gemm.pack import Placement, pack, pack_pieces, stacked
from engine.kernels.gemm.panels import pack_paired, pack_panels
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.coded_weight import CodedExperts
from engine.kernels.moe.dense import DenseExperts
from engine.kernels.moe.float8 import pack_float8_experts
from engine.kernels.moe.float8_weight import Float8Experts
from engine.kernels.moe.panels import ExpertPanels
from engine.kernels.moe.weight import ExpertsWeight


def pack_router(weight: Tensor, bias: Tensor | None, placement: Placement) -> Weight:
    """Pack weight [E, H] of any float dtype. It stays in `placement.dtype` on an accelerator, else becomes float32."""
    narrow = placement.device != "cpu" and weight.dtype == placement.dtype
    dtype = weight.dtype if narrow else torch.float32
    return pack(weight.to(placement.device, dtype), None if bias is None else bias.to(placement.device), placement)


def pack_experts(
    matrices: Sequence[Codes | Tensor], biases: Tensor | None, num_experts: int, placement: Placement, gated: bool
) -> ExpertsWeight:
    """Pack matrices: [N, K] per expert; if `gated`, gate and up separately or as one matrix; biases [E, N], gate
    first."""
    if placement.device == "cpu":
        return _panels(matrices, biases, num_experts, placement, gated)
    codes = [matrix for matrix in matrices if isinstance(matrix, Codes)]
    if codes:
        return _coded(codes, len(matrices), biases, num_experts, placement)
    whole = stacked([matrix.to(placement.device, placement.dtype) for matrix in matrices if isinstance(matrix, Tensor)])
    whole = whole.contiguous().view(num_experts, -1, whole.shape[-1])
    narrow = None if biases is None else biases.to(placement.device, placement.dtype).contiguous()
    return DenseExperts(whole, narrow, placement.invariant)


def _coded(
    codes: list[Codes], count: int, biases: Tensor | None, num_experts: int, placement: Placement
) -> ExpertsWeight:
    """Pack all experts as one matrix of codes. Inputs become FP8 only if the device multiplies FP8; else they stay
    floats."""
    meets = placement.float8_units and takes(codes[0]) and alike(codes)
    if not meets:
        codes = [replace(matrix, inputs=None) for matrix in codes]
    if len(codes) < count or not alike(codes) or codes[0].order is not None:
        raise ConfigError(
            "experts of a layer differ in their format, or have columns in another order (desc_act); an "
            "accelerator needs equal formats and columns in order: quantise the checkpoint again, or use "
            "--device cpu"
        )
    bias = None if biases is None else biases.to(placement.device, torch.float32).contiguous()
    whole = joined(codes)
    if whole.inputs is None:
        return CodedExperts(packed(whole), num_experts, bias, placement.invariant)
    weight = pack_float8_experts(whole, len(codes[0].values))
    return Float8Experts(weight, whole.inputs, num_experts, bias, placement.dtype, placement.invariant)


def _panels(
    matrices: Sequence[Codes | Tensor], biases: Tensor | None, num_experts: int, placement: Placement, gated: bool
) -> ExpertPanels:
    each = len(matrices) // num_experts
    experts = []
    for number in range(num_experts):
        mine = matrices[number * each : (number + 1) * each]
        bias = None if biases is None else biases[number]
        floats = [_in_activations_dtype(piece, placement) for piece in mine if isinstance(piece, Tensor)]
        if len(floats) < each:
            experts.append(pack_pieces(list(mine), bias, placement, gated))
        elif gated:
            both = floats if each == 2 else floats[0].chunk(2)
            experts.append(pack_paired(both, None if bias is None else bias.view(2, -1)))
        else:
            experts.append(pack_panels(floats[0], bias))
    rows = sum(len(piece.values if isinstance(piece, Codes) else piece) for piece in matrices[:each])
    return ExpertPanels(tuple(experts), rows // 2 if gated else rows, gated)


def _in_activations_dtype(piece: Tensor, placement: Placement) -> Tensor:
    """Keep bfloat16; convert other dtypes to the activations' dtype."""
    return piece if piece.dtype == torch.bfloat16 else piece.to(placement.dtype)
