"""A step's tokens into the pinned memory of the host that the step named: the last kernel of whatever samples.

    ring[home, row] = OUTSIDE if words[row_slot[row], SlotWord.OUTSIDE] else tokens[row]

The device writes over the bus by itself, so a recorded step can send its tokens to another buffer each time it runs,
and no copy on another stream has to wait for it. The host reads them when an event behind the kernel has been reached.
Pinned memory is coherent with both vendors' devices as torch asks for it, so any event will do. A row that read a token
id which the model does not have was given another one by the step's prep; here its token is withheld.
Users: engine/step/device_executor.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

MARK = tl.constexpr(int(SlotWord.OUTSIDE))
BLOCK = 256
OUTSIDE = -2  # instead of a token; -1 is a row whose logits are not finite


@triton.jit
def home_kernel(
    ring,  # [num_buffers, max_rows] int32, on the host
    tokens,  # [max_rows] int32
    home,  # [1] int32
    row_slot,  # [max_rows] int32
    words,  # [slots, SLOT_WORDS] int32
    num_buffers,
    max_rows,
    OUTSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK rows of the step's buffer per program."""
    grid_wait(OVERLAP)
    line = tl.minimum(tl.maximum(tl.load(home), 0), num_buffers - 1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(row_slot + row, mask=row < max_rows, other=0)
    token = tl.load(tokens + row, mask=row < max_rows)
    token = tl.where(tl.load(word(words, slot, MARK), mask=row < max_rows, other=0) != 0, OUTSIDE, token)
    tl.store(ring + line * max_rows + row, token, mask=row < max_rows)


def send_home(ring: Tensor, tokens: Tensor, home: Tensor, row_slot: Tensor, slots: SlotTensors) -> None:
    """ring int32 [num_buffers, max_rows] in pinned memory; tokens, row_slot int32 [max_rows]; home int32 [1], clamped.

    Rows whose slot is marked in SlotWord.OUTSIDE get OUTSIDE; every row_slot is one of `slots`.
    """
    if not tokens.is_cuda:
        send_home_reference(ring, tokens, home, row_slot, slots)
        return
    launch_home(ring, tokens, home, row_slot, slots)


def launch_home(ring: Tensor, tokens: Tensor, home: Tensor, row_slot: Tensor, slots: SlotTensors) -> None:
    """The kernel, on a grid that depends on shapes only."""
    buffers, rows = ring.shape
    assert ring.is_contiguous() and ring.dtype is tokens.dtype is torch.int32 and tokens.shape == (rows,)
    assert row_slot.dtype is torch.int32 and row_slot.shape == (rows,)
    home_kernel[(triton.cdiv(rows, BLOCK),)](
        ring, tokens, home, row_slot, slots.words, buffers, rows, OUTSIDE=OUTSIDE, BLOCK=BLOCK, num_warps=4,
        **launch_options(),
    )  # fmt: skip


def send_home_reference(ring: Tensor, tokens: Tensor, home: Tensor, row_slot: Tensor, slots: SlotTensors) -> None:
    marked = slots.word(SlotWord.OUTSIDE)[row_slot.long()] != 0
    ring[min(max(int(home), 0), len(ring) - 1)] = torch.where(marked, OUTSIDE, tokens)
