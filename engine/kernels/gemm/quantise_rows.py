"""Quantises rows to int8: q[m, k] = clamp(round(x[m, k] / s[m]), -128, 127); s[m]: largest magnitude / 127, or given.

A row of zeros has scale 1. Users: gemm/dispatch_codes, if the checkpoint quantises inputs to int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.codes import quantised_int8
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton


@triton.jit
def quantise_rows_kernel(
    out,  # [rows, width] int8
    scales,  # [rows] float32
    x,  # [rows, width], rows x_stride apart
    given,  # [] float32 when STATIC
    width,
    x_stride,
    STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row per program, read twice."""
    row = tl.program_id(0).to(tl.int64)
    grid_wait(OVERLAP)
    line = x + row * x_stride
    if STATIC:
        scale = tl.load(given)
    else:
        most = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            values = tl.load(line + column, mask=column < width, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(values))
        largest = tl.max(most, 0)
        scale = tl.where(largest > 0, tl.fdiv(largest, 127.0), 1.0)
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(line + column, mask=column < width, other=0.0).to(tl.float32)
        scaled = values / scale
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
        whole = (tl.minimum(tl.maximum(scaled, -128.0), 127.0) + 12582912.0) - 12582912.0
        tl.store(out + row * width + column, whole.to(tl.int8), mask=column < width)


def quantise_rows(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, K] with contiguous rows, scale [] float32 or None -> int8 [M, K] and scales float32 [M]."""
    return launch_quantise_rows(x, scale) if x.is_cuda else quantise_rows_reference(x, scale)


def launch_quantise_rows(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel."""
    assert x.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        quantise_rows_kernel[(len(x),)](
            out, scales, x, scales if scale is None else scale, x.shape[1], x.stride(0), STATIC=scale is not None,
            BLOCK=1024, **launch_options(),
        )  # fmt: skip
    return out, scales


def quantise_rows_reference(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    whole, scales = quantised_int8(x, scale)
    return whole.to(torch.int8), scales
