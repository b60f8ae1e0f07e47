"""Normalisation over the last axis: RMSNorm, RMSNorm of a sum (with the residual kept), LayerNorm.

rms_norm:   y = x / sqrt(mean(x^2) + eps) * (weight + offset)          offset is 1 where checkpoints store weight - 1
layer_norm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias     var is the biased one
Users: every decoder block (rms_norm, add_rms_norm), towers (both). Sums are float32 whatever the tensors are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., H] and weight [H] of the same dtype (or a float32 weight) -> a new [..., H]."""
    return rms_norm_reference(x, weight, eps, offset)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """residual += x, in place; returns (rms_norm(residual), residual). Both [..., H] and contiguous."""
    return add_rms_norm_reference(x, residual, weight, eps, offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., H], weight [H], bias [H] or None -> a new [..., H]."""
    return layer_norm_reference(x, weight, bias, eps)


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


def _wide(x: Tensor) -> torch.dtype:
    """Sums in float64 when the tests hand over float64, otherwise in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
