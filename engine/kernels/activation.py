"""Pointwise activations: the products of SwiGLU and GeGLU, and the three GELUs.

silu_mul:   y = gate * sigmoid(gate) * up,  x = [gate | up] along the last axis
gelu_mul:   y = gelu(gate) * up,  x as there
gelu:       y = x * Phi(x), exactly by erf, or by tanh(sqrt(2/pi) * (x + 0.044715 x^3)) with approximate="tanh"
quick_gelu: y = x * sigmoid(1.702 x)
Users: the MLP of every decoder (silu_mul) and of the towers; gelu_mul is for decoders with GeGLU, of which none is
served yet.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

GELU_ERF, GELU_TANH, QUICK_GELU, SILU = range(4)


@triton.jit
def point_kernel(
    out,  # [rows, width]
    x,  # [rows, width], or [rows, 2 * width] when GATED: what the activation is of, then what multiplies it
    width,
    OP: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row's BLOCK columns per program, in float32."""
    grid_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = x + row * (2 * width if GATED else width) + column
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if OP == 0:
        y = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif OP == 1:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        y = value / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh(a)) / 2 = 1 / (1 + exp(-2a))
    elif OP == 2:
        y = value / (1.0 + tl.exp(-1.702 * value))
    else:
        y = value / (1.0 + tl.exp(-value))
    if GATED:
        y *= tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    """x [..., 2*I], gate first -> a new [..., I]."""
    if _runs_here(x):
        return _launch(cpu.SILU_MUL, x, x.shape[-1] // 2)
    return launch_point(SILU, x, gated=True) if x.is_cuda else silu_mul_reference(x)


def gelu_mul(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x [..., 2*I], gate first -> a new [..., I]."""
    if x.is_cuda:
        return launch_point(GELU_ERF if approximate == "none" else GELU_TANH, x, gated=True)
    return gelu_mul_reference(x, approximate)


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x of any shape -> a new tensor of that shape."""
    if not _runs_here(x):
        if x.is_cuda:
            return launch_point(GELU_ERF if approximate == "none" else GELU_TANH, x)
        return gelu_reference(x, approximate)
    return _launch(cpu.GELU_ERF if approximate == "none" else cpu.GELU_TANH, x, x.shape[-1])


def quick_gelu(x: Tensor) -> Tensor:
    """x of any shape -> a new tensor of that shape."""
    if _runs_here(x):
        return _launch(cpu.QUICK_GELU, x, x.shape[-1])
    return launch_point(QUICK_GELU, x) if x.is_cuda else quick_gelu_reference(x)


def launch_point(op: int, x: Tensor, gated: bool = False) -> Tensor:
    """The Triton kernel on x of any shape -> a new contiguous one, of half the last axis when gated."""
    x = x.contiguous()
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    rows = out.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    point_kernel[grid](out, x, width, OP=op, GATED=gated, BLOCK=block, num_warps=4, **launch_options())
    return out


def silu_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.to(_wide(x)).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def gelu_mul_reference(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    gate, up = x.to(_wide(x)).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


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
