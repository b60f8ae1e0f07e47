"""Pointwise activations: of one tensor, and of gate and up of a gated MLP.

pointwise: y = f(x)                 f by name:
             SILU            x * sigmoid(x)
             GELU_TANH       gelu by tanh(sqrt(2/pi) * (x + 0.044715 x^3))       Starcoder2, GPT-2
             GELU            x * Phi(x), exactly by erf                          GPT-NeoX, towers
             RELU            max(x, 0)                                           OPT
             RELU2           max(x, 0)^2                                         Nemotron, Arcee
             QUICK_GELU      x * sigmoid(1.702 x)                                CLIP, Qwen2-VL's tower
             SIGMOID         sigmoid(x)                                          gates of attention (kernels/gate.py)
glu:       y = f(gate) * up,  x = [gate | up] along the last axis: SwiGLU (Llama, Qwen) with SILU, GeGLU (Gemma) with
           GELU_TANH; and one more:
             CLAMPED_SWIGLU  g * sigmoid(1.702 g) * (u + 1), g = min(gate, 7), u = up between -7 and 7      gpt-oss
Users: MLPs of decoders and towers; kernels/gemm, whose gated products call `activate`. activate.h has the C version.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.room import empty_rows
from engine.kernels.target import tl, triton

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
QUICK_GELU_ALPHA = 1.702


class Activation(IntEnum):
    """Activations; the numbers are the constant ACT of the kernels, and equal the numbers in C."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SWIGLU = 2
    GELU = 3
    RELU = 4
    RELU2 = 5
    QUICK_GELU = 6
    SIGMOID = 7


BY_NAME = {  # in config.json
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "quick_gelu": Activation.QUICK_GELU,
}


@triton.jit
def gelu_tanh(x):
    """gelu by tanh, float32: (1 + tanh(a)) / 2 = 1 / (1 + exp(-2a))."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def activate_one(x, ACT: tl.constexpr):
    """f(x), float32. ACT: a number of `Activation`, but not CLAMPED_SWIGLU."""
    if ACT == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        y = gelu_tanh(x)
    elif ACT == 3:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 6:
        y = x / (1.0 + tl.exp(-1.702 * x))
    elif ACT == 7:
        y = 1.0 / (1.0 + tl.exp(-x))
    else:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACT == 5:
            y = y * y
    return y


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """The epilogue of a gated product, float32 blocks of one shape. ACT: a number of `Activation`."""
    if ACT == 2:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        y = activate_one(gate, ACT) * up
    return y


@triton.jit
def point_kernel(
    out,  # [rows, width]
    x,  # [rows, width], or [rows, 2 * width] when GATED: gate, then up
    width,
    ACT: tl.constexpr,  # an Activation
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
        y = activate(value, tl.load(source + width, mask=inside, other=0.0).to(tl.float32), ACT)
    else:
        y = activate_one(value, ACT)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def glu(x: Tensor, activation: Activation) -> Tensor:
    """x [..., 2*I], gate first -> a new [..., I]."""
    if _runs_here(x):
        return _launch(int(activation), x, x.shape[-1] // 2)
    return launch_point(activation, x, gated=True) if x.is_cuda else glu_reference(x, activation)


def pointwise(x: Tensor, activation: Activation) -> Tensor:
    """x of any shape -> a new tensor of that shape; every activation but CLAMPED_SWIGLU."""
    assert activation is not Activation.CLAMPED_SWIGLU, "this activation takes gate and up"
    if _runs_here(x):
        return _launch(cpu.PLAIN + int(activation), x, x.shape[-1])
    return launch_point(activation, x) if x.is_cuda else pointwise_reference(x, activation)


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x of any shape -> a new tensor of that shape."""
    return pointwise(x, Activation.GELU if approximate == "none" else Activation.GELU_TANH)


def launch_point(activation: Activation, x: Tensor, gated: bool = False) -> Tensor:
    """The Triton kernel on x of any shape -> a new contiguous one, of half the last axis when gated."""
    x = x.contiguous()
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    out = empty_rows(x, width)
    rows = out.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    point_kernel[grid](out, x, width, ACT=int(activation), GATED=gated, BLOCK=block, num_warps=4, **launch_options())
    return out


def glu_reference(x: Tensor, activation: Activation) -> Tensor:
    return activate_reference(x.to(_wide(x)), activation).to(x.dtype)


def pointwise_reference(x: Tensor, activation: Activation) -> Tensor:
    return _activated(x.to(_wide(x)), activation).to(x.dtype)


def gelu_reference(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    return torch.nn.functional.gelu(x.to(_wide(x)), approximate=approximate).to(x.dtype)


def activate_reference(both: Tensor, activation: Activation) -> Tensor:
    """`activate` in torch: [..., 2*I] float32 or float64, gate first -> [..., I]."""
    gate, up = both.chunk(2, dim=-1)
    if activation is not Activation.CLAMPED_SWIGLU:
        return _activated(gate, activation) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.SILU:
        return x * torch.sigmoid(x)
    if activation is Activation.QUICK_GELU:
        return x * torch.sigmoid(QUICK_GELU_ALPHA * x)
    if activation is Activation.SIGMOID:
        return torch.sigmoid(x)
    if activation in (Activation.GELU, Activation.GELU_TANH):
        return torch.nn.functional.gelu(x, approximate="none" if activation is Activation.GELU else "tanh")
    return x.relu() if activation is Activation.RELU else x.relu().square()


def _runs_here(x: Tensor) -> bool:
    return x.is_cpu and (x.dtype is torch.float32 or x.dtype is torch.bfloat16)


def _launch(op: int, x: Tensor, width: int) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], width))
    stride = x.shape[-1]
    cpu.point(op, out.data_ptr(), x.data_ptr(), x.numel() // stride, width, stride, x.dtype is torch.bfloat16)
    return out


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
