"""Normalisation over the last axis: RMSNorm, RMSNorm of a sum (with the residual kept), LayerNorm.

rms_norm:   y = x / sqrt(mean(x^2) + eps) * (weight + offset)          offset is 1 where checkpoints store weight - 1
layer_norm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias     var is the biased one
Users: every decoder block (rms_norm, add_rms_norm), towers (both). Sums are float32 whatever the tensors are.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast import cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., H] float32 or bfloat16 and weight [H] of either -> a new [..., H] of x's dtype."""
    if not _runs_here(x):
        return rms_norm_reference(x, weight, eps, offset)
    return _launch(cpu.RMS_NORM, x, None, weight, None, eps, offset)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """residual += x, in place; returns (rms_norm(residual), residual). Both [..., H] and contiguous."""
    if not _runs_here(x):
        return add_rms_norm_reference(x, residual, weight, eps, offset)
    assert residual.numel() == x.numel() and residual.dtype is x.dtype and residual.is_contiguous()
    return _launch(cpu.ADD_RMS_NORM, x, residual, weight, None, eps, offset), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., H], weight [H], bias [H] or None -> a new [..., H]."""
    if not _runs_here(x):
        return layer_norm_reference(x, weight, bias, eps)
    return _launch(cpu.LAYER_NORM, x, None, weight, bias, eps, 0.0)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    wide = x.to(_wide(x))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    residual += x
    return rms_norm_reference(residual, weight, eps, offset), residual


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.to(_wide(x))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype)


def _runs_here(x: Tensor) -> bool:
    return x.is_cpu and (x.dtype is torch.float32 or x.dtype is torch.bfloat16) and x.shape[-1] <= cpu.NORM_MAX


def _launch(
    op: int, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: float
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
    out = torch.empty_like(x)
    cpu.norm(
        op, out.data_ptr(), 0 if residual is None else residual.data_ptr(), x.data_ptr(),
        weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        rows, width, stride, eps, offset, x.dtype is torch.bfloat16, narrow,
    )  # fmt: skip
    return out


def _wide(x: Tensor) -> torch.dtype:
    """Sums in float64 when the tests hand over float64, otherwise in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
