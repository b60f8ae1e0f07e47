"""Copy of a step's drafts to the pinned host buffer that the step names, at the begin of the step's forward.

    ring[home, row] = verified drafts of the row, or -1 if the row does not sample; then the slot's drafts

The host fills the masks of grammars along the drafts while the forward runs, so it does not wait for an event: it sets
its lines to UNREAD before the launch, and reads a line once none of its values is UNREAD. Each value is written at once
and no other value depends on it, so the order of the writes does not matter. Users: engine/step/backend/device/home.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.step_tensors import SlotTensors
from engine.kernels.target import tl, triton

UNREAD = -(1 << 31)  # no draft has this value
BLOCK = 256


@triton.jit
def drafts_home_kernel(
    ring,  # [num_buffers, max_rows, 1 + NUM] int32, on the host
    home,  # [1] int32
    row_drafts,  # [max_rows] int32
    row_slot,  # [max_rows] int32
    drafts,  # [slots, NUM] int32
    num_buffers,
    max_rows,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program writes BLOCK places of the step's buffer."""
    line = tl.minimum(tl.maximum(tl.load(home), 0), num_buffers - 1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < max_rows * (1 + NUM)
    row, number = place // (1 + NUM), place % (1 + NUM) - 1
    slot = tl.load(row_slot + row, mask=inside, other=0)
    draft = tl.load(drafts + slot * NUM + number, mask=inside & (number >= 0), other=0)
    count = tl.load(row_drafts + row, mask=inside, other=-1)
    value = tl.maximum(tl.where(number < 0, count, draft), -1)
    tl.store(ring + line * max_rows * (1 + NUM) + place, value, mask=inside, cache_modifier=".wt")


def send_drafts(ring: Tensor, home: Tensor, row_drafts: Tensor, row_slot: Tensor, slots: SlotTensors) -> None:
    """Write the drafts of a step to ring int32 [num_buffers, max_rows, 1 + most drafts] (pinned) at home int32 [1].

    `home` is clamped. row_drafts, row_slot int32 [max_rows]: verified drafts of each row, -1: it does not sample; and
    its slot in `slots`. Drafts that are not verified may be anything.
    """
    run = launch_drafts if row_drafts.is_cuda else send_drafts_reference
    run(ring, home, row_drafts, row_slot, slots)


def launch_drafts(ring: Tensor, home: Tensor, row_drafts: Tensor, row_slot: Tensor, slots: SlotTensors) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    buffers, rows, width = ring.shape
    assert ring.is_contiguous() and width == 1 + slots.drafts.shape[1]
    assert ring.dtype is row_drafts.dtype is row_slot.dtype is torch.int32
    assert row_drafts.shape == row_slot.shape == (rows,)
    drafts_home_kernel[(triton.cdiv(rows * width, BLOCK),)](
        ring, home, row_drafts, row_slot, slots.drafts, buffers, rows, NUM=width - 1, BLOCK=BLOCK, num_warps=4
    )


def send_drafts_reference(ring: Tensor, home: Tensor, row_drafts: Tensor, row_slot: Tensor, slots: SlotTensors) -> None:
    found = torch.cat([row_drafts[:, None], slots.drafts[row_slot.long()]], 1)
    ring[min(max(int(home), 0), len(ring) - 1)] = found.clamp(min=-1)
