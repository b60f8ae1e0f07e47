"""Normalisation over the last axis: RMSNorm, LayerNorm.

rms_norm:   y = x / sqrt(mean(x^2) + eps) * (weight + offset)          offset is 1 where checkpoints store weight - 1
layer_norm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias     var is the biased one; x may be a sum of two
Users: every decoder block (rms_norm), towers (both). Sums are float32 for every dtype of the tensors.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.room import empty_rows
from engine.kernels.target import tl, triton


@triton.jit
def norm_kernel(
    out,  # [rows, width]
    x,  # [rows, width], rows x_stride apart
    weight,  # [width]
    bias,  # [width] when BIAS
    residual,  # [rows, width], added to x first when ADD
    width,
    x_stride,
    eps,
    offset,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= width
    OVERLAP: tl.constexpr,
):
    """A program normalises one row: it holds the whole row in registers and sums in float32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    grid_wait(OVERLAP)
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRE:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    y = wide * scale * gain
    if BIAS:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """Normalise x [..., H]; x and weight [H] are float32 or bfloat16. Return [..., H] in x's dtype: `out` or a new
    tensor."""
    if not _runs_here(x):
        if x.is_cuda:
            return launch_norm(x, weight, None, eps, offset, centre=False, out=out)
        return rms_norm_reference(x, weight, eps, offset, out)
    return _launch(cpu.RMS_NORM, x, weight, None, eps, offset, out)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Normalise x [..., H] (or x + residual) with weight [H], bias [H] or None. Return `out` (contiguous) or a new
    tensor."""
    if not _runs_here(x):
        if x.is_cuda:
            return launch_norm(x, weight, bias, eps, 0.0, centre=True, out=out, residual=residual)
        return layer_norm_reference(x if residual is None else x + residual, weight, bias, eps, out)
    return _launch(cpu.LAYER_NORM, x if residual is None else x + residual, weight, bias, eps, 0.0, out)


def launch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centre: bool,
    out: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Launch the Triton kernel on x [..., H] with contiguous rows -> `out` or a new tensor, contiguous [..., H].

    residual: shaped like x, contiguous; added to x in float32.
    """
    width = x.shape[-1]
    rows = x.view(-1, width) if x.is_contiguous() else x
    assert rows.dim() == 2 and rows.stride(1) == 1, "x must be contiguous, or two-dimensional with contiguous rows"
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    out = empty_rows(x, width) if out is None else _result(x, out)
    block = triton.next_power_of_2(width)
    norm_kernel[(rows.shape[0],)](
        out, rows, weight, weight if bias is None else bias, rows if residual is None else residual,
        width, rows.stride(0), eps, offset, BIAS=bias is not None, ADD=residual is not None, CENTRE=centre, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **launch_options(),
    )  # fmt: skip
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    wide = x.to(_wide(x))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)
    return y if out is None else out.copy_(y)


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    wide = x.to(_wide(x))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    y = y.to(x.dtype)
    return y if out is None else out.copy_(y)


def _runs_here(x: Tensor) -> bool:
    return x.is_cpu and (x.dtype is torch.float32 or x.dtype is torch.bfloat16) and x.shape[-1] <= cpu.NORM_MAX


def _launch(
    op: int, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, out: Tensor | None = None
) -> Tensor:
    width = weight.numel()
    assert x.shape[-1] == width, f"x has {x.shape[-1]} features; this norm takes {width}"
    if x.is_contiguous():
        rows, stride = x.numel() // width, width
    else:
        assert x.dim() == 2 and x.stride(1) == 1, "x must be contiguous, or two-dimensional with contiguous rows"
        rows, stride = x.shape[0], x.stride(0)
    narrow = weight.dtype is torch.bfloat16
    assert weight.is_contiguous() and (narrow or weight.dtype is torch.float32)
    assert bias is None or (bias.numel() == width and bias.dtype is weight.dtype and bias.is_contiguous())
    out = _result(x, out)
    cpu.norm(
        op, out.data_ptr(), x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        rows, width, stride, eps, offset, x.dtype is torch.bfloat16, narrow,
    )  # fmt: skip
    return out


def _result(x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert out.shape == x.shape and out.dtype is x.dtype and out.is_contiguous(), "out must be contiguous and like x"
    return out


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 if x is float64 (tests), otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
