"""Places of rows that only the device knows: in steps with runs, where a fed row begins, and its number of drafts.

    begin = SlotWord.LENGTH - 1                       drafts = min(SlotWord.NUM_DRAFTS, planned, up to the last place)
    begin = COMPUTED of a row whose place the host knows (RowFlag.EXACT): steps without drafts write no LENGTH

The plan has room for more drafts than the device may have, so the rows are closed up. Users:
engine/kernels/step_inputs, engine/kernels/deal_drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import HEADER_LEN, RowColumn, RowFlag, SlotWord
from engine.kernels.step_tensors import SlotTensors, StepInputs, word
from engine.kernels.target import tl, triton

HEAD = tl.constexpr(HEADER_LEN)
SLOT, _, LEN, COMPUTED, FLAGS = (tl.constexpr(int(one)) for one in RowColumn)
FEED = tl.constexpr(int(RowFlag.FEED))
EXACT = tl.constexpr(int(RowFlag.EXACT))
LAST_PLACE = tl.constexpr(int(SlotWord.LAST_PLACE))
LENGTH = tl.constexpr(int(SlotWord.LENGTH))
NUM_DRAFTS = tl.constexpr(int(SlotWord.NUM_DRAFTS))
SOME_ROWS = tl.constexpr(32)  # rows that are compared with the tokens of a program together


@triton.jit
def first_place(words, slot, flags, computed, fed):
    """Return where rows begin in their sequences; `fed` selects the rows with RowFlag.FEED."""
    moved = fed & ((flags & EXACT) == 0)
    return tl.where(moved, tl.load(word(words, slot, LENGTH), mask=moved, other=0) - 1, computed)


@triton.jit
def resolve(words, slot, flags, length, computed, here, max_tokens):
    """Return number of tokens, start in the sequence, and drafts of rows in steps with runs. A fed row begins at its
    slot's newest token, and the slot's drafts follow, as many as the plan has room for."""
    fed = here & ((flags & FEED) != 0)
    begin = first_place(words, slot, flags, computed, fed)
    own = begin + 1
    room = tl.minimum(length - 1, tl.load(word(words, slot, LAST_PLACE), mask=fed, other=0) - own)
    drafts = tl.minimum(tl.load(word(words, slot, NUM_DRAFTS), mask=fed, other=0), room)
    drafts = tl.where(fed, tl.minimum(tl.maximum(drafts, 0), max_tokens), 0)
    length = tl.where(fed, 1 + drafts, tl.minimum(tl.maximum(length, 0), max_tokens))
    return tl.where(here, length, 0), begin, drafts


@triton.jit
def find_rows(token, words, staged, rows, max_rows, max_tokens, max_slots, BLOCK: tl.constexpr):
    """Return each token's row, the row's first token, and the step's number of tokens, in steps with runs."""
    record, column = staged + HEAD, max_rows + 1
    row, begin = tl.full([BLOCK], -1, tl.int32), tl.zeros([BLOCK], tl.int32)
    total = tl.minimum(rows, 0)
    for first in range(0, rows, SOME_ROWS):
        number = first + tl.arange(0, SOME_ROWS)
        here = number < rows
        slot = tl.load(record + SLOT * column + number, mask=here, other=max_slots)
        slot = tl.where((slot >= 0) & (slot < max_slots), slot, max_slots)
        length = tl.load(record + LEN * column + number, mask=here, other=0)
        flags = tl.load(record + FLAGS * column + number, mask=here, other=0)
        computed = tl.load(record + COMPUTED * column + number, mask=here, other=0)
        length, _, _ = resolve(words, slot, flags, length, computed, here, max_tokens)
        start = total + tl.cumsum(length, 0) - length
        before = here[None, :] & (start[None, :] <= token[:, None])
        row += tl.sum(before.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(before, start[None, :], 0), 1))
        total += tl.sum(length, 0)
    return tl.maximum(row, 0), begin, total


def resolve_reference(
    slots: SlotTensors, slot: Tensor, flags: Tensor, length: Tensor, computed: Tensor, max_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Specification of `resolve` for rows int64 [rows] -> their numbers of tokens, starts in the sequence, drafts."""
    fed = (flags & RowFlag.FEED) != 0
    own = torch.where((flags & RowFlag.EXACT) != 0, computed + 1, slots.word(SlotWord.LENGTH)[slot].long())
    room = torch.minimum(length - 1, slots.word(SlotWord.LAST_PLACE)[slot] - own)
    drafts = torch.minimum(slots.word(SlotWord.NUM_DRAFTS)[slot].long(), room).clamp(0, max_tokens) * fed
    length = torch.where(fed, 1 + drafts, length.clamp(0, max_tokens))
    return length, torch.where(fed, own - 1, computed), drafts


def fill_lines_reference(
    out: StepInputs,
    sampled: Tensor,
    drafts: Tensor,
    slot: Tensor,
    last: Tensor,
    number: Tensor,
    dummy: int,
    max_tokens: int,
    width: int,
) -> None:
    """Fill the lines; by row: whether it samples, its drafts, its slot, its last token, and this token's number."""
    row = sampled.nonzero().flatten()
    row = row.repeat_interleave(1 + drafts[row])  # of each line
    place = torch.arange(len(row)) - torch.searchsorted(row, row)  # in the row's run
    row, place = row[: len(out.sample_row)], place[: len(out.sample_row)]
    later = place - drafts[row]  # of the row's last line: 0
    fill(out.sample_index, (last[row] + later).clamp(0, max_tokens - 1), 0)
    fill(out.sample_row, row * width + place, -1)
    fill(out.sample_slot, slot[row], dummy)
    fill(out.sample_place, (number[row] + later).clamp(min=0), 0)
    out.num_sampled.fill_(len(row))
    if out.row_drafts is not None:
        fill(out.row_drafts, torch.where(sampled, drafts, -1), -1)


def fill(line: Tensor, values: Tensor, beyond: int) -> None:
    """Write values to the beginning of a line, and `beyond` after them."""
    line.fill_(beyond)
    line[: len(values)] = values.to(line.dtype)
