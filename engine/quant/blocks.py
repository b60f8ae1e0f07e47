"""MXFP4: 4-bit codes in blocks of 32 columns, for a layer's experts. Thread: any.

blocks U8 [E, N, K / 32, 16], two E2M1 codes in a byte, the lower column low    scales U8 [E, N, K / 32]: 2^(byte - 127)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import Codes, Kind
from engine.quant.checks import Checks
from engine.quant.stored import scale_of

GROUP = 32  # columns that share a scale


def holds_experts(config: Section) -> bool:
    """Whether a checkpoint stores its experts as MXFP4 blocks."""
    return bool((config.values.get("quantization_config") or {}).get("quant_method") == "mxfp4")


def block_matrices(blocks: Sequence[Tensor], scales: Sequence[Tensor], device: str) -> list[Codes]:
    """The matrices of a layer's experts, which are on `device`: of each, blocks [N, K / 32, 16], scales [N, K / 32]."""
    with Checks(device) as checks:
        return [_codes(*each, checks) for each in zip(blocks, scales, strict=True)]


def _codes(blocks: Tensor, scales: Tensor, checks: Checks) -> Codes:
    values = torch.stack([blocks & 15, blocks >> 4], dim=3).flatten(1)
    return Codes(Kind.E2M1, values, scale_of("scales", scales, checks), GROUP)
