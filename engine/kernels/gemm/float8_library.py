"""FP8 codes times FP8 codes by the vendor's library.

In: two operands of codes with a scale per row; on some cards also codes with a scale per 128 columns times codes with a
scale per block of 128 rows and columns. Users: gemm/dispatch_float8, and gemm/scaled, which compares the times of the
library and our kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.float8 import BLOCK
from engine.kernels.gemm.groups import Packed

FOUR = 4  # the library reads rows of x, and blocks of columns of a weight, in fours


def library_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    """As `float8_product`, by the library, for weights for which `suits` holds; bias [N] of out's dtype."""
    e4m3 = torch.float8_e4m3fn
    if weight.blocks is not None:
        _blocks_product(x.view(e4m3), x_scales, weight.codes.view(e4m3), weight.blocks, bias, residual, out)
        return
    assert weight.row_scales is not None and weight.scales is None, "a scale per row of the weight"  # noqa: PT018
    x, codes = x.view(e4m3), weight.codes.view(e4m3).t()
    scales = {"scale_a": x_scales.view(-1, 1), "scale_b": weight.row_scales.view(1, -1)}
    # The library's fast accumulation has only 14 bits per sum.
    if residual is None:
        torch._scaled_mm(x, codes, **scales, bias=bias, out_dtype=out.dtype, use_fast_accum=False, out=out)
    else:
        product = torch._scaled_mm(x, codes, **scales, bias=bias, out_dtype=out.dtype, use_fast_accum=False)
        torch.add(residual, product, out=out)


def suits(weight: Packed) -> bool:
    """Whether the library supports the weight's scales."""
    return weight.scales is None or weight.blocks is not None


def blocks_of(scale: Tensor) -> Tensor | None:
    """Scales [N, K / 128] of rows -> [N / 128, K / 128 padded to fours] for the library; None: rows of a block differ.

    The library reads the scales of a block's columns in fours; it does not use the padding.
    """
    if len(scale) % BLOCK:
        return None
    rows = scale.unflatten(0, (-1, BLOCK))
    if not bool((rows == rows[:, :1]).all()):
        return None
    return torch.nn.functional.pad(rows[:, 0].float(), (0, -scale.shape[1] % FOUR)).contiguous()


def _blocks_product(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    blocks: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """x [M, K], x_scales [K / 128, M], codes [N, K]; the library needs column-major scales, and M padded to fours."""
    from torch.nn.functional import ScalingType

    rows, more = len(x), -len(x) % FOUR
    if more:
        x = torch.nn.functional.pad(x.view(torch.uint8), (0, 0, 0, more)).view(x.dtype)
        x_scales = torch.nn.functional.pad(x_scales, (0, more))
    direct = residual is None and not more
    y = out if direct else out.new_empty(len(x), out.shape[1])
    by_columns, by_blocks = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
    torch._scaled_mm_v2(
        x, codes.t(), [x_scales.t()], [by_columns], [], [blocks.t()], [by_blocks], [], None, out.dtype, (), False, out=y
    )
    if bias is not None:
        y += bias
    if residual is not None:
        torch.add(residual, y[:rows], out=out)
    elif not direct:
        out.copy_(y[:rows])
