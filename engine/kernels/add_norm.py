"""What a norm behind a part adds to the residual stream, and the norm that reads the stream next, in one pass.

    residual += x / rms(x) * inner;   out = residual / rms(residual) * outer, if asked for

Users: the residual stream (engine/layers/stream.py) of decoders with norms behind attention and MLP: Gemma 2 and 3,
GLM-4, OLMo 2 and 3, EXAONE 4. Sums are float32; the second norm reads the stream as it is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.norm import rms_norm, rms_norm_reference
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton


@triton.jit
def add_norm_kernel(
    out,  # [rows, width] when THEN
    residual,  # [rows, width], changed in place
    x,  # [rows, width]
    inner,  # [width] float32
    outer,  # [width] float32 when THEN
    width,
    inner_eps,
    outer_eps,
    THEN: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= width
    OVERLAP: tl.constexpr,
):
    """One row per program, all of it in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(inner + column, mask=inside, other=0.0)
    if THEN:
        next_gain = tl.load(outer + column, mask=inside, other=0.0)
    grid_wait(OVERLAP)
    place = row * width + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    stream += value * (1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / width + inner_eps)) * gain
    kept = stream.to(residual.dtype.element_ty)
    tl.store(residual + place, kept, mask=inside)
    if THEN:
        kept = kept.to(tl.float32)
        y = kept * (1.0 / tl.sqrt_rn(tl.sum(kept * kept, 0) / width + outer_eps)) * next_gain
        tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def add_norm(
    residual: Tensor, x: Tensor, inner: Tensor, inner_eps: float, outer: Tensor | None, outer_eps: float
) -> Tensor | None:
    """residual [T, H] += rms_norm(x [T, H], inner), in place -> a new rms_norm(residual, outer) [T, H]; or None.

    inner and outer [H] float32; without `outer` nothing but the stream is written.
    """
    if residual.is_cuda:
        return launch_add_norm(residual, x, inner, inner_eps, outer, outer_eps)
    residual += rms_norm(x, inner, inner_eps)
    return None if outer is None else rms_norm(residual, outer, outer_eps)


def launch_add_norm(
    residual: Tensor, x: Tensor, inner: Tensor, inner_eps: float, outer: Tensor | None, outer_eps: float
) -> Tensor | None:
    """The Triton kernel; arguments as `add_norm`."""
    assert residual.shape == x.shape, f"residual {tuple(residual.shape)}, x {tuple(x.shape)}"
    assert residual.is_contiguous(), "residual must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    rows, width = x.shape
    out = None if outer is None else torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    add_norm_kernel[(rows,)](
        residual if out is None else out, residual, x, inner, inner if outer is None else outer, width, inner_eps,
        outer_eps, THEN=outer is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(),
    )  # fmt: skip
    return out


def add_norm_reference(
    residual: Tensor, x: Tensor, inner: Tensor, inner_eps: float, outer: Tensor | None, outer_eps: float
) -> Tensor | None:
    wide = torch.promote_types(x.dtype, torch.float32)
    residual.copy_(residual.to(wide) + rms_norm_reference(x.to(wide), inner, inner_eps))
    return None if outer is None else rms_norm_reference(residual, outer, outer_eps)
