"""Grouped convolution inside the blocks of a drafter, whose kernel depends on the query.

    out[i, c] = sum over taps t <= before[i] of (base[t, c] + delta[i, t, c // group]) * x[i - t, c]

where before[i] counts the queries of i's row before i.

Base and delta have two sides: one for a sublayer's input, one for its output. User: engine/models/drafters/dflash2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.target import tl, triton

COLUMNS = 1024  # per program


@triton.jit
def block_convolution_kernel(
    out,  # [queries, width]
    x,  # [queries, width]
    delta,  # [queries, 2, TAPS, width / GROUP]
    base,  # [2, TAPS, width] float32
    before,  # [queries] int32
    width,
    SIDE: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one query per program, summed in float32."""
    query = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    behind = tl.load(before + query) + column * 0  # in every lane, as masks are
    groups = width // GROUP
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        value = tl.load(x + (query - tap) * width + column, mask=inside & (behind >= tap), other=0.0).to(tl.float32)
        own = tl.load(delta + ((query * 2 + SIDE) * TAPS + tap) * groups + column // GROUP, mask=inside, other=0.0)
        fixed = tl.load(base + (SIDE * TAPS + tap) * width + column, mask=inside, other=0.0)
        total += (fixed + own.to(tl.float32)) * value
    tl.store(out + query * width + column, total.to(out.dtype.element_ty), mask=inside)


def block_convolution(x: Tensor, delta: Tensor, base: Tensor, before: Tensor, side: int) -> Tensor:
    """Return a new tensor like x [N, width]; see above.

    delta [N, 2 * taps * groups]; base float32 [2, taps, width]; before int32 [N]; side: 0 or 1. Contiguous.
    """
    run = launch_block_convolution if x.is_cuda else block_convolution_reference
    return run(x, delta, base, before, side)


def launch_block_convolution(x: Tensor, delta: Tensor, base: Tensor, before: Tensor, side: int) -> Tensor:
    """Launch the kernel on a grid that depends only on shapes."""
    (queries, width), taps = x.shape, base.shape[1]
    groups = delta.shape[1] // (2 * taps)
    assert x.is_contiguous()
    assert delta.is_contiguous()
    assert base.is_contiguous()
    assert delta.shape[1] == 2 * taps * groups
    assert width % groups == 0
    out = torch.empty_like(x)
    if queries:
        block_convolution_kernel[(queries, triton.cdiv(width, COLUMNS))](
            out, x, delta, base, before, width, SIDE=side, TAPS=taps, GROUP=width // groups, BLOCK=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


def block_convolution_reference(x: Tensor, delta: Tensor, base: Tensor, before: Tensor, side: int) -> Tensor:
    (queries, width), taps = x.shape, base.shape[1]
    own = delta.view(queries, 2, taps, -1)[:, side].float()  # [N, taps, groups]
    weight = base[side] + own.repeat_interleave(width // own.shape[2], 2)  # [N, taps, width]
    total = torch.zeros_like(x, dtype=torch.float32)
    for tap in range(min(taps, queries)):
        shifted = torch.cat([torch.zeros_like(x[:tap]), x[: queries - tap]]).float()
        total += weight[:, tap] * shifted.where((before >= tap)[:, None], 0.0)
    return total.to(x.dtype)
