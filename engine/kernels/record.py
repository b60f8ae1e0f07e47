"""Transfer of a step's record from pinned memory to the device: copies rows and tokens, applies changes of slots.

`_fast/layout.py` defines the layout of a record and of a slot's row. One launch on a fixed grid:

    record_kernel   the first programs: header, rows, tokens and positions -> staged
                    the others: block-table changes and the rows of new slots -> SlotTensors

A read over the bus takes one or two microseconds. So each word is read once, with wide loads for adjacent words. Words
that most steps have are read before the header is known, so a typical step waits for the bus only once. A record is
rewritten three steps later, so all loads bypass the caches (.cv: cached copies of host memory are stale). Records are
used in rotation by a counter on the device (step_inputs). So a recorded step contains no address of a single record and
is recorded only once. Lengths come from the header, and every number is clamped to the size of what it indexes.
Users: engine/kernels/step_inputs; thread: device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import HEADER_LEN, SLOT_WORDS, UPDATE_WORDS, Header, SlotWord, UpdateWord, tail_at, tokens_at
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.step_tensors import SlotTensors
from engine.kernels.target import tl, triton

HEAD = tl.constexpr(HEADER_LEN)
NUM_TOKENS = tl.constexpr(int(Header.NUM_TOKENS))
NUM_UPDATES = tl.constexpr(int(Header.NUM_UPDATES))
NUM_PARAMS = tl.constexpr(int(Header.NUM_PARAMS))
POSITIONS_AT = tl.constexpr(int(Header.POSITIONS_AT))
UPDATE = tl.constexpr(UPDATE_WORDS)
SLOT, INDEX, BLOCK_NAME, GROUP = (tl.constexpr(int(one)) for one in UpdateWord)
PARAMS = tl.constexpr(SLOT_WORDS)
OWN_NUMBER = tl.constexpr(int(SlotWord.SLOT))
WORDS = 1024  # per program and iteration
COPIERS = 4  # programs that copy words, before those that apply changes
CHANGES = 256  # block-table changes per program and iteration
SLOTS = 64  # rows of slots per program and iteration
APPLIERS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Buffers in which the host writes plans in rotation, and the device's copy of the current plan."""

    pinned: Tensor  # [num_records, capacity] int32, on the host
    staged: Tensor  # [capacity] int32: header, rows, tokens and positions between the two kernels
    turn: Tensor  # [1] int32: the next record


def records_in(pinned: Tensor, device: str | torch.device) -> Records:
    """Make Records for pinned int32 [num_records, capacity]. The first record is next; ALIGNED divides capacity."""
    staged = torch.zeros(pinned.shape[1], dtype=torch.int32, device=device)
    return Records(pinned, staged, torch.zeros(1, dtype=torch.int32, device=device))


@triton.jit
def ask_header(record, BLOCK: tl.constexpr):
    """Load the header into the first of BLOCK lanes, once, because each load of a word is a separate read over the
    bus."""
    word = tl.arange(0, BLOCK)
    return tl.load(record + word, mask=word < HEAD, other=0, cache_modifier=".cv")


@triton.jit
def header_word(header, number, most, BLOCK: tl.constexpr):
    """Return one number of the header, clamped to 0 .. `most`."""
    return tl.minimum(tl.maximum(tl.sum(tl.where(tl.arange(0, BLOCK) == number, header, 0), 0), 0), most)


@triton.jit
def copy_words(staged, record, first, end, BLOCK: tl.constexpr):
    """Copy words first .. end - 1 of a record, at most BLOCK; both are multiples of 16, so that loads are wide."""
    word = first + tl.arange(0, BLOCK)
    tl.store(staged + word, tl.load(record + word, mask=word < end, cache_modifier=".cv"), mask=word < end)


@triton.jit
def copy_record(
    staged, record, place, places, capacity, tokens_at, max_tokens, at_once,
    AXES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy everything before the tail, and the positions; the first `at_once` words are loaded together with the
    header."""
    header = ask_header(record, BLOCK)
    start, stride = place * BLOCK, places * BLOCK
    for first in range(start, at_once, stride):
        copy_words(staged, record, first, capacity, BLOCK)
    tokens = header_word(header, NUM_TOKENS, max_tokens, BLOCK)
    for first in range(at_once + start, tokens_at + tokens, stride):
        copy_words(staged, record, first, (tokens_at + tokens + 15) // 16 * 16, BLOCK)
    if AXES:
        at = header_word(header, POSITIONS_AT, capacity, BLOCK)
        if (at > 0) & (at <= capacity - AXES * tokens):
            for first in range(at // 16 * 16 + start, at + AXES * tokens, stride):
                copy_words(staged, record, first, (at + AXES * tokens + 15) // 16 * 16, BLOCK)


@triton.jit
def ask_updates(record, tail, first, end, BLOCK: tl.constexpr):
    """Load updates first .. end - 1, at most BLOCK."""
    number = first + tl.arange(0, BLOCK)[:, None]
    place = tl.arange(0, UPDATE)[None, :]
    return tl.load(record + tail + number * UPDATE + place, mask=number < end, other=-1, cache_modifier=".cv")


@triton.jit
def set_blocks(block_tables, entry, count, num_groups, max_slots, max_blocks, BLOCK: tl.constexpr):
    """Apply the first `count` of these block-table updates."""
    place = tl.arange(0, UPDATE)[None, :]
    slot = tl.sum(tl.where(place == SLOT, entry, 0), 1)
    index = tl.sum(tl.where(place == INDEX, entry, 0), 1)
    block = tl.sum(tl.where(place == BLOCK_NAME, entry, 0), 1)
    group = tl.sum(tl.where(place == GROUP, entry, 0), 1)
    inside = (slot >= 0) & (slot < max_slots) & (index >= 0) & (index < max_blocks)
    inside &= tl.arange(0, BLOCK) < count
    inside &= (group >= 0) & (group < num_groups)
    line = group.to(tl.int64) * (max_slots + 1) + slot
    tl.store(block_tables + line * max_blocks + index, tl.maximum(block, 0), mask=inside)


@triton.jit
def set_words(words, rows, first, count, max_slots, BLOCK: tl.constexpr):
    """Copy rows first .. count - 1 of `rows`, at most BLOCK, each to its slot."""
    number = first + tl.arange(0, BLOCK)[:, None]
    place = tl.arange(0, PARAMS)[None, :]
    row = tl.load(rows + number * PARAMS + place, mask=number < count, other=-1, cache_modifier=".cv")
    slot = tl.sum(tl.where(place == OWN_NUMBER, row, 0), 1)[:, None]
    tl.store(words + slot * PARAMS + place, row, mask=(slot >= 0) & (slot < max_slots))


@triton.jit
def record_kernel(
    staged,  # [capacity]
    block_tables,  # [num_groups, max_slots + 1, max_blocks]
    words,  # [max_slots + 1, SLOT_WORDS]
    pinned,  # [num_records, capacity], on the host
    turn,  # [1]
    num_records,
    capacity,
    tokens_at,  # where the tokens begin
    max_tokens,
    at_once,  # words that are copied regardless of the header
    tail,  # where the updates begin
    num_groups,
    max_slots,
    max_blocks,
    AXES: tl.constexpr,  # positions per token that may follow the tokens
    COPIERS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first COPIERS programs copy; the others apply changes. No table entry and no slot occurs twice."""
    grid_wait(OVERLAP)
    mine = tl.minimum(tl.maximum(tl.load(turn), 0), num_records - 1)
    record = pinned + mine.to(tl.int64) * capacity
    program = tl.program_id(0)
    if program < COPIERS:
        copy_record(staged, record, program, COPIERS, capacity, tokens_at, max_tokens, at_once, AXES, WORDS)
    else:
        start, stride = (program - COPIERS) * BLOCK, (tl.num_programs(0) - COPIERS) * BLOCK
        header = ask_header(record, BLOCK)
        most = (capacity - tail) // UPDATE
        if start == 0:  # most steps have no more; these are loaded together with the header
            entry = ask_updates(record, tail, 0, most, BLOCK)
            count = header_word(header, NUM_UPDATES, most, BLOCK)
            set_blocks(block_tables, entry, count, num_groups, max_slots, max_blocks, BLOCK)
            start = stride
        num_updates = header_word(header, NUM_UPDATES, most, BLOCK)
        for first in range(start, num_updates, stride):
            entry = ask_updates(record, tail, first, num_updates, BLOCK)
            set_blocks(block_tables, entry, num_updates - first, num_groups, max_slots, max_blocks, BLOCK)
        params_at = tail + num_updates * UPDATE
        num_params = header_word(header, NUM_PARAMS, (capacity - params_at) // PARAMS, BLOCK)
        for first in range((program - COPIERS) * SLOTS, num_params, (tl.num_programs(0) - COPIERS) * SLOTS):
            set_words(words, record + params_at, first, num_params, max_slots, SLOTS)


def take_record(slots: SlotTensors, records: Records, max_rows: int, max_tokens: int, axes: int) -> None:
    """Update `slots` from the next record and copy the rest of the record to `records.staged`; `records.turn` stays.

    axes: positions per token that may follow the tokens. Capturable: the record's lengths are read on the device.
    """
    num_groups, lines, max_blocks = slots.block_tables.shape
    count, capacity = records.pinned.shape
    first_token = tokens_at(max_rows)
    at_once = triton.cdiv(first_token + max_rows, WORDS) * WORDS  # a step that only decodes has one token per row
    record_kernel[(COPIERS + APPLIERS,)](
        records.staged, slots.block_tables, slots.words, records.pinned, records.turn, count, capacity, first_token,
        max_tokens, at_once, tail_at(max_rows, max_tokens), num_groups, lines - 1, max_blocks,
        AXES=axes, COPIERS=COPIERS, WORDS=WORDS, BLOCK=CHANGES, SLOTS=SLOTS, num_warps=4, **launch_options(),
    )  # fmt: skip


def take_record_reference(slots: SlotTensors, record: Tensor, tail: int) -> None:
    num_groups, lines, max_blocks = slots.block_tables.shape
    dummy = lines - 1
    num_updates = min(max(int(record[Header.NUM_UPDATES]), 0), (record.numel() - tail) // UPDATE_WORDS)
    end = tail + num_updates * UPDATE_WORDS
    slot, index, block, group = record[tail:end].view(num_updates, UPDATE_WORDS).long().unbind(1)
    kept = (slot >= 0) & (slot < dummy) & (index >= 0) & (index < max_blocks) & (group >= 0) & (group < num_groups)
    slots.block_tables[group[kept], slot[kept], index[kept]] = block[kept].clamp(min=0).to(torch.int32)
    num_params = min(max(int(record[Header.NUM_PARAMS]), 0), (record.numel() - end) // SLOT_WORDS)
    rows = record[end : end + num_params * SLOT_WORDS].view(num_params, SLOT_WORDS)
    rows = rows[(rows[:, SlotWord.SLOT] >= 0) & (rows[:, SlotWord.SLOT] < dummy)]
    slots.words[rows[:, SlotWord.SLOT].long()] = rows
