"""Copy of a step's tokens to the pinned host buffer that the step names: the last kernel of every sampling step.

    ring[home, row, k] = OUTSIDE if words[row_slot[row], SlotWord.OUTSIDE] else runs[row, k]

A row's run is its tokens, then its end if there are fewer than `width`: a TokenCode.END, lowered by the number of
invalid drafts (RunEnd), and here, after a step with drafts, by the number of drafts that the slot has for the tokens
after the run, and by the number of verified drafts. After a step without drafts only the first place of a run counts.
The kernel writes over the bus directly, so a recorded step can send its tokens to a different buffer in each run, and
no copy on another stream has to wait for the step. The host reads the tokens after an event that follows the kernel.
torch allocates pinned memory so that it is coherent with both vendors' devices, so any event works. If a row's input
had a token id that the model does not have, the step's prep replaced the id; here the row's token is withheld.
Users: engine/step/backend/device/home.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import RunEnd, SlotWord, TokenCode
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

MARK = tl.constexpr(int(SlotWord.OUTSIDE))
NUM_DRAFTS = tl.constexpr(int(SlotWord.NUM_DRAFTS))
END = tl.constexpr(int(TokenCode.END))
VERIFIED = tl.constexpr(int(RunEnd.VERIFIED))
BLOCK = 256


@triton.jit
def home_kernel(
    ring,  # [num_buffers, max_rows, WIDTH] int32, on the host
    runs,  # [max_rows, WIDTH] int32
    home,  # [1] int32
    row_slot,  # [max_rows] int32
    row_drafts,  # [max_rows] int32; None: a step without drafts
    words,  # [slots, SLOT_WORDS] int32
    num_buffers,
    max_rows,
    OUTSIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program writes BLOCK places of the step's buffer."""
    grid_wait(OVERLAP)
    line = tl.minimum(tl.maximum(tl.load(home), 0), num_buffers - 1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < max_rows * WIDTH
    row = place // WIDTH
    slot = tl.load(row_slot + row, mask=inside, other=0)
    token = tl.load(runs + place, mask=inside)
    if row_drafts is not None:
        ends = inside & (token <= END)
        verified = tl.maximum(tl.load(row_drafts + row, mask=ends, other=0), 0)
        token -= tl.load(word(words, slot, NUM_DRAFTS), mask=ends, other=0) + VERIFIED * verified
    elif WIDTH > 1:
        token = tl.where(place % WIDTH == 0, token, END)
    token = tl.where(tl.load(word(words, slot, MARK), mask=inside, other=0) != 0, OUTSIDE, token)
    tl.store(ring + line * max_rows * WIDTH + place, token, mask=inside)


def send_home(
    ring: Tensor, runs: Tensor, home: Tensor, row_slot: Tensor, slots: SlotTensors, row_drafts: Tensor | None = None
) -> None:
    """Write runs int32 [max_rows, width] to ring int32 [num_buffers, max_rows, width] (pinned) at home int32 [1].

    `home` is clamped. row_slot int32 [max_rows]: each row's slot in `slots`. Rows whose slot is marked in
    SlotWord.OUTSIDE get TokenCode.OUTSIDE. row_drafts int32 [max_rows]: verified drafts; None: a step without drafts.
    """
    run = launch_home if runs.is_cuda else send_home_reference
    run(ring, runs, home, row_slot, slots, row_drafts)


def launch_home(
    ring: Tensor, runs: Tensor, home: Tensor, row_slot: Tensor, slots: SlotTensors, row_drafts: Tensor | None = None
) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    buffers, rows, width = ring.shape
    assert ring.is_contiguous() and runs.is_contiguous() and runs.shape == (rows, width)
    assert ring.dtype is runs.dtype is torch.int32
    assert row_slot.dtype is torch.int32 and row_slot.shape == (rows,)
    home_kernel[(triton.cdiv(rows * width, BLOCK),)](
        ring, runs, home, row_slot, row_drafts, slots.words, buffers, rows, OUTSIDE=int(TokenCode.OUTSIDE), WIDTH=width,
        BLOCK=BLOCK, num_warps=4, **launch_options(),
    )  # fmt: skip


def send_home_reference(
    ring: Tensor, runs: Tensor, home: Tensor, row_slot: Tensor, slots: SlotTensors, row_drafts: Tensor | None = None
) -> None:
    marked = slots.word(SlotWord.OUTSIDE)[row_slot.long()] != 0
    if row_drafts is not None:
        code = slots.word(SlotWord.NUM_DRAFTS)[row_slot.long()] + RunEnd.VERIFIED * row_drafts.clamp(min=0)
        runs = runs - torch.where(runs <= TokenCode.END, code[:, None], 0)
    else:
        runs = torch.where(torch.arange(runs.shape[1], device=runs.device) == 0, runs, int(TokenCode.END))
    ring[min(max(int(home), 0), len(ring) - 1)] = torch.where(marked[:, None], int(TokenCode.OUTSIDE), runs)
