"""Copy of pooled lines to the host: the last kernel of a pooling model's step writes them into pinned memory.

out[home, n] = lines[n], n < rows. User: engine/step/parts/pooling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

BLOCK = 1024


@triton.jit
def pool_home_kernel(
    out,  # [num_buffers, max_rows, width] float32, on the host
    lines,  # [rows, width] float32
    home,  # [1] int32
    num_buffers,
    max_rows,
    width,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program copies BLOCK numbers of one line."""
    grid_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    buffer = tl.minimum(tl.maximum(tl.load(home), 0), num_buffers - 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(lines + row * width + column, mask=inside)
    tl.store(out + (buffer * max_rows + row) * width + column, values, mask=inside)


def pool_home(out: Tensor, lines: Tensor, home: Tensor) -> None:
    """Copy lines float32 [rows, width] (contiguous) to out float32 [num_buffers, max_rows, width] at home int32 [1]."""
    if lines.is_cuda:
        launch_pool_home(out, lines, home)
    else:
        pool_home_reference(out, lines, home)


def launch_pool_home(out: Tensor, lines: Tensor, home: Tensor) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    (buffers, most, width), rows = out.shape, len(lines)
    assert out.is_contiguous(), "the host's buffers are contiguous"
    assert lines.is_contiguous(), "lines follow each other"
    assert lines.shape == (rows, width), f"lines of {tuple(lines.shape)} for a width of {width}"
    assert lines.dtype is out.dtype is torch.float32, "lines are float32"
    if rows:
        pool_home_kernel[(rows, triton.cdiv(width, BLOCK))](
            out, lines, home, buffers, most, width, BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=4,
            **launch_options(),
        )  # fmt: skip


def pool_home_reference(out: Tensor, lines: Tensor, home: Tensor) -> None:
    out[min(max(int(home), 0), len(out) - 1), : len(lines)] = lines
