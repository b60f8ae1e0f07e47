"""Multiplies values by sigmoid(gates) in place; gates are columns of a wider product.

Users: attention layers whose query product also makes a gate for each output channel (Qwen3-Next, Qwen3.5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.activation import Activation
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton


@triton.jit
def gate_kernel(
    values,  # [rows, width], changed in place
    gates,  # [rows, width], rows `stride` apart
    width,
    stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program computes BLOCK columns of one row, in float32."""
    grid_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gates + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    target = values + row * width + column
    value = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (value / (1.0 + tl.exp(-gate))).to(values.dtype.element_ty), mask=inside)


def multiply_by_sigmoid(values: Tensor, gates: Tensor) -> Tensor:
    """values [T, width] contiguous, gates [T, width] with contiguous columns -> values, multiplied in place."""
    assert values.shape == gates.shape, "a gate for each value"
    if values.is_cuda:
        return launch_gate(values, gates)
    if not values.is_cpu or values.dtype not in (torch.float32, torch.bfloat16) or gates.dtype != values.dtype:
        return values.copy_(gate_reference(values, gates))
    _check(values, gates)
    narrow, (rows, width) = values.dtype is torch.bfloat16, values.shape
    room, op = values.data_ptr(), int(Activation.SIGMOID)
    cpu.point(op, room, gates.data_ptr(), rows, width, gates.stride(0), narrow, room)
    return values


def launch_gate(values: Tensor, gates: Tensor) -> Tensor:
    """Launches the Triton kernel; arguments as `multiply_by_sigmoid`."""
    _check(values, gates)
    rows, width = values.shape
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        grid = (rows, triton.cdiv(width, block))
        gate_kernel[grid](values, gates, width, gates.stride(0), BLOCK=block, num_warps=4, **launch_options())
    return values


def gate_reference(values: Tensor, gates: Tensor) -> Tensor:
    """Returns the product as a new tensor."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) * torch.sigmoid(gates.to(wide))).to(values.dtype)


def _check(values: Tensor, gates: Tensor) -> None:
    assert values.is_contiguous(), "values change in place, row by row"
    assert gates.stride(1) == 1, "a row's gates lie side by side"
