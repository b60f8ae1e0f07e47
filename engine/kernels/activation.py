"""Pointwise activations: the gated products of an MLP, and GELU.

glu:   y = activate(gate, up),  x = [gate | up] along the last axis
         SILU            silu(gate) * up                                         SwiGLU: Llama, Qwen
         GELU_TANH       gelu(gate) * up, gelu by tanh                           GeGLU: Gemma
         CLAMPED_SWIGLU  g * sigmoid(1.702 g) * (u + 1), g = min(gate, 7), u = up between -7 and 7      gpt-oss
gelu:  y = x * Phi(x), exactly by erf, or by tanh(sqrt(2/pi) * (x + 0.044715 x^3)) with approximate="tanh"
Users: MLPs of decoders and towers; kernels/gemm, whose gated products end in `activate`; C has the same in activate.h.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

GELU_ERF, GELU_TANH = range(2)
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class Activation(IntEnum):
    """What a gated layer makes of gate and up; the numbers are the kernels' ACT, and C's."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SWIGLU = 2


@triton.jit
def gelu_tanh(x):
    """gelu by tanh, float32: (1 + tanh(a)) / 2 = 1 / (1 + exp(-2a))."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """The epilogue of a gated product, float32 blocks of one shape. ACT: a number of `Activation`."""
    if ACT == 0:
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif ACT == 1:
        y = gelu_tanh(gate) * up
    else:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return y


@triton.jit
def point_kernel(
    out,  # [rows, width]
    x,  # [rows, width], or [rows, 2 * width] when GATED: gate, then up
    width,
    OP: tl.constexpr,  # GATED: an Activation; else 0: gelu by erf, 1: by tanh
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
    if GATED:
        y = activate(value, tl.load(source + width, mask=inside, other=0.0).to(tl.float32), OP)
    elif OP == 0:
        y = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        y = gelu_tanh(value)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def glu(x: Tensor, activation: Activation) -> Tensor:
    """x [..., 2*I], gate first -> a new [..., I]."""
    if _runs_here(x):
        return _launch(int(activation), x, x.shape[-1] // 2)
    return launch_point(int(activation), x, gated=True) if x.is_cuda else glu_reference(x, activation)


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x of any shape -> a new tensor of that shape."""
    if not _runs_here(x):
        if x.is_cuda:
            return launch_point(GELU_ERF if approximate == "none" else GELU_TANH, x)
        return gelu_reference(x, approximate)
    return _launch(cpu.GELU_ERF if approximate == "none" else cpu.GELU_TANH, x, x.shape[-1])


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


def glu_reference(x: Tensor, activation: Activation) -> Tensor:
    return activate_reference(x.to(_wide(x)), activation).to(x.dtype)


def activate_reference(both: Tensor, activation: Activation) -> Tensor:
    """`activate` in torch: [..., 2*I] float32 or float64, gate first -> [..., I]."""
    gate, up = both.chunk(2, dim=-1)
    if activation is Activation.SILU:
        return gate * torch.sigmoid(gate) * up
    if activation is Activation.GELU_TANH:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def gelu_reference(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    return torch.nn.functional.gelu(x.to(_wide(x)), approximate=approximate).to(x.dtype)


def _runs_here(x: Tensor) -> bool:
    return x.is_cpu and (x.dtype is torch.float32 or x.dtype is torch.bfloat16)


def _launch(op: int, x: Tensor, width: int) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], width))
    cpu.point(op, out.data_ptr(), x.data_ptr(), x.numel() // x.shape[-1], width, x.dtype is torch.bfloat16)
    return out


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
