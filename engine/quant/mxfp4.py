"""mxfp4: gpt-oss. Experts alone are quantised, in tensors of their own names, which their layer reads (layers/moe).

blocks U8 [E, N, K / 32, 16], two E2M1 codes in a byte, the lower column low    scales U8 [E, N, K / 32]: 2^(byte - 127)
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import Codes, Kind
from engine.quant.base import Headers, Stored
from engine.quant.stored import scale_of

GROUP = 32  # columns that share a scale


class Mxfp4:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        """The configuration names what is not quantised; the files say the same."""

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        """Every module that holds one matrix is kept in floats."""
        return None


def mxfp4_codes(blocks: Tensor, scales: Tensor) -> Codes:
    """One matrix: blocks [N, K / 32, 16], scales [N, K / 32]."""
    values = torch.stack([blocks & 15, blocks >> 4], dim=3).flatten(1)
    return Codes(Kind.E2M1, values, scale_of("scales", scales), GROUP)
