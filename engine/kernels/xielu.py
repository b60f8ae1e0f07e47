"""xIELU, an activation with learned slopes (arXiv 2411.13010).

    y = p x^2 + beta x                              x > 0
        n (exp(min(x, eps)) - 1 - x) + beta x       else
    p = softplus(alpha_p), n = beta + softplus(alpha_n)

Users: Apertus' MLPs, between their two products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton


@triton.jit
def xielu_kernel(
    out,  # [num_values]
    x,  # [num_values]
    slopes,  # [4] float32: p, n, beta, eps
    num_values,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes BLOCK values in float32."""
    grid_wait(OVERLAP)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_values
    positive, negative = tl.load(slopes), tl.load(slopes + 1)
    beta, eps = tl.load(slopes + 2), tl.load(slopes + 3)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    low = tl.minimum(value, eps)
    # Near 0 the first terms of the series give exp(x) - 1 more precisely than float32's exp.
    grown = tl.where(low > -0.01, low * (1.0 + low * (0.5 + low * (1.0 / 6 + low * (1.0 / 24)))), tl.exp(low) - 1.0)
    y = tl.where(value > 0, positive * value * value, negative * (grown - value)) + beta * value
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def xielu(x: Tensor, slopes: Tensor) -> Tensor:
    """Apply xIELU with slopes [4] float32 (p, n, beta, eps): a new tensor of x's shape."""
    return launch_xielu(x, slopes) if x.is_cuda else xielu_reference(x, slopes)


def launch_xielu(x: Tensor, slopes: Tensor) -> Tensor:
    """Launch the Triton kernel; x is contiguous."""
    assert x.is_contiguous(), "x must be contiguous"
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), 1024),)
        xielu_kernel[grid](out, x, slopes, x.numel(), BLOCK=1024, num_warps=4, **launch_options())
    return out


def xielu_reference(x: Tensor, slopes: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    positive, negative, beta, eps = slopes.to(wide.dtype)
    bent = torch.where(wide > 0, positive * wide.square(), negative * (torch.expm1(torch.minimum(wide, eps)) - wide))
    return (bent + beta * wide).to(x.dtype)
