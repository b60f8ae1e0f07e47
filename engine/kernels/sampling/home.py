"""A step's tokens into the pinned memory of the host that the step named: the last kernel of whatever samples.

    ring[home, row] = tokens[row]

The device writes over the bus by itself, so a recorded step can send its tokens to another buffer each time it runs,
and no copy on another stream has to wait for it. The host reads them when an event behind the kernel has been reached.
Pinned memory is coherent with both vendors' devices as torch asks for it, so any event will do.
Users: engine/step/accelerated.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.overlap import begin, launch_options
from engine.kernels.target import tl, triton

BLOCK = 256


@triton.jit
def home_kernel(
    ring,  # [num_buffers, max_rows] int32, on the host
    tokens,  # [max_rows] int32
    home,  # [1] int32
    num_buffers,
    max_rows,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK rows of the step's buffer per program."""
    begin(OVERLAP)
    line = tl.minimum(tl.maximum(tl.load(home), 0), num_buffers - 1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ring + line * max_rows + row, tl.load(tokens + row, mask=row < max_rows), mask=row < max_rows)


def send_home(ring: Tensor, tokens: Tensor, home: Tensor) -> None:
    """ring int32 [num_buffers, max_rows] in pinned memory, tokens int32 [max_rows], home int32 [1], clamped."""
    if not tokens.is_cuda:
        send_home_reference(ring, tokens, home)
        return
    launch_home(ring, tokens, home)


def launch_home(ring: Tensor, tokens: Tensor, home: Tensor) -> None:
    """The kernel, on a grid that depends on shapes only."""
    buffers, rows = ring.shape
    assert ring.is_contiguous() and ring.dtype is tokens.dtype is torch.int32 and tokens.shape == (rows,)
    home_kernel[(triton.cdiv(rows, BLOCK),)](
        ring, tokens, home, buffers, rows, BLOCK=BLOCK, num_warps=4, **launch_options()
    )


def send_home_reference(ring: Tensor, tokens: Tensor, home: Tensor) -> None:
    ring[min(max(int(home), 0), len(ring) - 1)] = tokens
