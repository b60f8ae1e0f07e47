"""Pointwise activations: SwiGLU's product and the three GELUs.

silu_mul:   y = gate * sigmoid(gate) * up,  x = [gate | up] along the last axis
gelu:       y = x * Phi(x), exactly by erf, or by tanh(sqrt(2/pi) * (x + 0.044715 x^3)) with approximate="tanh"
quick_gelu: y = x * sigmoid(1.702 x)
Users: the MLP of every decoder (silu_mul) and of the towers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from _fast import cpu


def silu_mul(x: Tensor) -> Tensor:
    """x [..., 2*I], gate first -> a new [..., I]."""
    return _launch(cpu.SILU_MUL, x, x.shape[-1] // 2) if _runs_here(x) else silu_mul_reference(x)


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x of any shape -> a new tensor of that shape."""
    if not _runs_here(x):
        return gelu_reference(x, approximate)
    return _launch(cpu.GELU_ERF if approximate == "none" else cpu.GELU_TANH, x, x.shape[-1])


def quick_gelu(x: Tensor) -> Tensor:
    """x of any shape -> a new tensor of that shape."""
    return _launch(cpu.QUICK_GELU, x, x.shape[-1]) if _runs_here(x) else quick_gelu_reference(x)


def silu_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.to(_wide(x)).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def gelu_reference(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    return torch.nn.functional.gelu(x.to(_wide(x)), approximate=approximate).to(x.dtype)


def quick_gelu_reference(x: Tensor) -> Tensor:
    wide = x.to(_wide(x))
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def _runs_here(x: Tensor) -> bool:
    return x.is_cpu and (x.dtype is torch.float32 or x.dtype is torch.bfloat16)


def _launch(op: int, x: Tensor, width: int) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], width))
    cpu.point(op, out.data_ptr(), x.data_ptr(), x.numel() // x.shape[-1], width, x.dtype is torch.bfloat16)
    return out


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
