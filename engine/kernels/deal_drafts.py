"""Deals a step's drafts out among its rows: the most probable ones over all rows, as many as the plan has places.

    places for drafts = tokens of the step - tokens of rows without drafts - 1 per row with drafts
    row's share = its drafts with a survival above the limit, then those at the limit, first rows first

The limit is the largest survival that more drafts reach than there are places; it is found bit by bit. Survivals fall
along a row, so a row's share is a prefix of its drafts. The share replaces the slot's number of drafts
(SlotWord.NUM_DRAFTS), which kernels/step_inputs reads next. The host decided on the number of places with outcomes that
are one step older (_fast/budget). User: engine/kernels/step_inputs, in steps with drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import HEADER_LEN, Acceptance, Header, RowColumn, RowFlag, SlotWord
from engine.kernels.fed_rows import first_place
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.survivals import refresh, refresh_reference
from engine.kernels.target import tl, triton

HEAD = tl.constexpr(HEADER_LEN)
NUM_ROWS = tl.constexpr(int(Header.NUM_ROWS))
NUM_TOKENS = tl.constexpr(int(Header.NUM_TOKENS))
SLOT, _, LEN, COMPUTED, FLAGS = (tl.constexpr(int(one)) for one in RowColumn)
FEED = tl.constexpr(int(RowFlag.FEED))
LAST_PLACE = tl.constexpr(int(SlotWord.LAST_PLACE))
NUM_DRAFTS = tl.constexpr(int(SlotWord.NUM_DRAFTS))
PER_WARP = 512  # survivals, at most 32 warps


@triton.jit
def deal_drafts_kernel(
    words,  # [slots, SLOT_WORDS] int32
    survivals,  # [slots, NUM] int32
    right,  # [NUM] int32, as the next two
    tried,
    model,
    staged,  # [capacity] int32: the record
    max_rows,
    max_tokens,
    max_slots,
    NUM: tl.constexpr,  # most drafts of a slot
    ROWS: tl.constexpr,  # power of two >= max_rows
    LANES: tl.constexpr,  # power of two >= NUM
    BITS: tl.constexpr,  # of Acceptance.ONE
):
    """One program."""
    refresh(right, tried, model, NUM, LANES)
    rows = tl.minimum(tl.maximum(tl.load(staged + NUM_ROWS), 0), max_rows)
    tokens = tl.minimum(tl.maximum(tl.load(staged + NUM_TOKENS), 0), max_tokens)
    row, place = tl.arange(0, ROWS), tl.arange(0, LANES)
    here = row < rows
    record, column = staged + HEAD + row, max_rows + 1
    slot = tl.load(record + SLOT * column, mask=here, other=max_slots)
    slot = tl.where((slot >= 0) & (slot < max_slots), slot, max_slots)
    length = tl.load(record + LEN * column, mask=here, other=0)
    computed = tl.load(record + COMPUTED * column, mask=here, other=0)
    flags = tl.load(record + FLAGS * column, mask=here, other=0)
    fed = here & ((flags & FEED) != 0)
    drafted = fed & (length > 1)
    length = tl.minimum(tl.maximum(length, 0), max_tokens)
    places = tl.maximum(tokens - tl.sum(tl.where(fed, 1, tl.where(here, length, 0)), 0), 0)
    own = first_place(words, slot, flags, computed, drafted) + 1
    room = tl.minimum(length - 1, tl.load(word(words, slot, LAST_PLACE), mask=drafted, other=0) - own)
    drafts = tl.minimum(tl.load(word(words, slot, NUM_DRAFTS), mask=drafted, other=0), tl.minimum(room, NUM))
    drafts = tl.where(drafted, tl.maximum(drafts, 0), 0)
    if tl.sum(drafts, 0) > places:
        mine = survivals + slot[:, None] * NUM + place[None, :]
        survival = tl.load(mine, mask=place[None, :] < drafts[:, None], other=0)
        limit = tl.minimum(places, 0)
        for step in tl.static_range(BITS):
            higher = limit | (1 << (BITS - 1 - step))
            reach = tl.sum(tl.sum((survival >= higher).to(tl.int32), 1), 0)
            limit = tl.where(reach > places, higher, limit)
        above = tl.sum((survival > limit).to(tl.int32), 1)
        equal = tl.sum((survival == limit).to(tl.int32), 1)
        left = places - tl.sum(above, 0) - (tl.cumsum(equal, 0) - equal)
        drafts = tl.minimum(drafts, above + tl.minimum(tl.maximum(left, 0), equal))
    tl.store(word(words, slot, NUM_DRAFTS), drafts, mask=drafted)


def launch_deal_drafts(slots: SlotTensors, staged: Tensor, max_rows: int, max_tokens: int) -> None:
    """Launch the kernel; staged int32 [capacity]: the step's record."""
    state, number = slots.survivals, slots.drafts.shape[1]
    rows, lanes = triton.next_power_of_2(max_rows), triton.next_power_of_2(number)
    deal_drafts_kernel[(1,)](
        slots.words, state.survivals, state.right, state.tried, state.model, staged, max_rows, max_tokens,
        len(slots.words) - 1, NUM=number, ROWS=rows, LANES=lanes,
        BITS=int(Acceptance.ONE).bit_length(), num_warps=min(max(rows * lanes // PER_WARP, 4), 32),
    )  # fmt: skip


def deal_drafts_reference(slots: SlotTensors, slot: Tensor, drafts: Tensor, places: int) -> Tensor:
    """Specification of the kernel for rows with drafts: int64 [rows] slots, drafts that they have -> their shares."""
    refresh_reference(slots.survivals)
    if int(drafts.sum()) <= places:
        return drafts
    place = torch.arange(slots.drafts.shape[1])
    survival = slots.survivals.survivals[slot].where(place < drafts[:, None], 0)  # [rows, K]
    ranked = survival.flatten().sort(descending=True, stable=True).indices[:places]
    return torch.bincount(ranked // len(place), minlength=len(slot)).minimum(drafts)
