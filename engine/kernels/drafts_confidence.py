"""Survivals of a slot's drafts from a drafter's own confidence in them (kernels/survivals).

    survival of place j = c[0] * .. * c[j]        c: the confidence of the step's drafts, behind them the estimates

A step's drafts are dealt before its drafter guesses them, so the next step is dealt by the confidence in this step's
drafts: a text that is hard to guess stays hard for a while. A row without drafts gets back to its estimates.
User: engine/step/parts/drafter_walk, after the choice. Thread: the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import Acceptance
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.target import tl, triton

ONE = tl.constexpr(int(Acceptance.ONE))


@triton.jit
def take_confidence_kernel(
    survivals,  # [slots, NUM] int32
    estimates,  # [slots, NUM] int32
    confidence,  # [slots, NUM] float32
    row_slot,  # [max_rows] int32, as the next
    row_drafts,
    NUM: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= NUM
):
    """A program per row."""
    row = tl.program_id(0)
    drafts = tl.load(row_drafts + row)
    if drafts > 0:
        slot, lane = tl.load(row_slot + row), tl.arange(0, LANES)
        known = tl.load(confidence + slot * NUM + lane, mask=lane < drafts, other=0.0)
        known = tl.where(known > 0.0, tl.minimum(known, 1.0), 0.0)  # a value that is no number counts as 0
        own = tl.load(estimates + slot * NUM + lane, mask=lane < NUM, other=0)
        own = tl.where(lane < drafts, (known * ONE).to(tl.int32), own)
        survival = tl.max(lane * 0, 0) + ONE
        for place in range(NUM):
            survival = tl.maximum((survival * tl.sum(tl.where(lane == place, own, 0), 0)) // ONE, 1)
            tl.store(survivals + slot * NUM + place, survival)


def take_confidence(rows: DraftedRows, confidence: Tensor) -> None:
    """Write the survivals of all rows with drafts; confidence float32 [slots, K]: of each slot's newest drafts."""
    run = launch_take_confidence if confidence.is_cuda else take_confidence_reference
    run(rows, confidence)


def launch_take_confidence(rows: DraftedRows, confidence: Tensor) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    state, number = rows.state.survivals, confidence.shape[1]
    assert confidence.is_contiguous()
    take_confidence_kernel[(len(rows.drafts),)](
        state.survivals, state.estimates, confidence, rows.slots, rows.drafts, NUM=number,
        LANES=triton.next_power_of_2(number), num_warps=1,
    )  # fmt: skip


def take_confidence_reference(rows: DraftedRows, confidence: Tensor) -> None:
    state, row = rows.state.survivals, (rows.drafts > 0).nonzero().flatten()
    slot = rows.slots[row].long()
    known = confidence[slot].nan_to_num(0.0).clamp(0.0, 1.0)
    place = torch.arange(confidence.shape[1], device=confidence.device)
    own = torch.where(place < rows.drafts[row, None], (known * Acceptance.ONE).int(), state.estimates[slot])
    survival = torch.full((len(slot),), int(Acceptance.ONE), device=own.device)
    for number, each in enumerate(own.unbind(1)):
        survival = (survival * each // Acceptance.ONE).clamp(min=1)
        state.survivals[slot, number] = survival.int()
