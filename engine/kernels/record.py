"""From the record of a step in pinned memory to the device: rows and tokens are copied, changes of slots applied.

Layout of a record in `_fast/plan.pyx`. One launch on a fixed grid:

    record_kernel   the first programs: header, rows, tokens and positions -> staged
                    the others: block-table changes and changed sampling words -> SlotTensors

A word takes a microsecond or two to come over the bus. So each is asked for once, by wide loads where it lies among
others, and what most steps have is asked for before the header says whether this one has it: the common step waits for
the bus once. A record is rewritten three steps later, so all loads go past the caches (.cv: what is cached of the
host's memory is stale). Records take turns, counted on the device (step_inputs), so that a recorded step has no address
of its own record and need be recorded once. Lengths come from the header and every number is clamped to what it
indexes. Users: engine/kernels/step_inputs; thread: device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

if TYPE_CHECKING:
    from engine.kernels.step_inputs import SlotTensors

HEADER_LEN = 16
PARAM_WORDS = 12  # slot, prompt_len, position_delta, temperature, top_k, top_p, min_p, seed (2), three penalties
UPDATE_WORDS = 4  # slot, index, block, group
ALIGNED = 16  # words; a record begins at a multiple of it, and so does its tail: wide loads need it
WORDS = 1024  # of one program and turn
COPIERS = 4  # programs that copy words, before those that apply changes
CHANGES = 256  # of one program and turn
APPLIERS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Where the host writes plans, one step after the other in turn, and what the device keeps of the one at work."""

    pinned: Tensor  # [num_records, capacity] int32, on the host
    staged: Tensor  # [capacity] int32: header, rows, tokens and positions between the two kernels
    turn: Tensor  # [1] int32: the record that is next


def records_in(pinned: Tensor, device: str | torch.device) -> Records:
    """pinned int32 [num_records, capacity], of which the first is next; capacity a multiple of ALIGNED."""
    staged = torch.zeros(pinned.shape[1], dtype=torch.int32, device=device)
    return Records(pinned, staged, torch.zeros(1, dtype=torch.int32, device=device))


def tokens_of(max_rows: int) -> int:
    """Where the token ids of a record begin."""
    return HEADER_LEN + 5 * max_rows + 1


def tail_of(max_rows: int, max_tokens: int) -> int:
    """Where the updates of a record begin."""
    return -(-(tokens_of(max_rows) + max_tokens) // ALIGNED) * ALIGNED


@triton.jit
def ask_header(record, BLOCK: tl.constexpr):
    """The header in the first of BLOCK lanes, asked for once: each load of a word goes over the bus by itself."""
    word = tl.arange(0, BLOCK)
    return tl.load(record + word, mask=word < 16, other=0, cache_modifier=".cv")


@triton.jit
def header_word(header, number, most, BLOCK: tl.constexpr):
    """One of its numbers, 0 to `most`."""
    return tl.minimum(tl.maximum(tl.sum(tl.where(tl.arange(0, BLOCK) == number, header, 0), 0), 0), most)


@triton.jit
def copy_words(staged, record, first, end, BLOCK: tl.constexpr):
    """Words first .. end - 1 of a record, BLOCK at most; multiples of 16, so that loads are wide."""
    word = first + tl.arange(0, BLOCK)
    tl.store(staged + word, tl.load(record + word, mask=word < end, cache_modifier=".cv"), mask=word < end)


@triton.jit
def copy_record(
    staged, record, place, places, capacity, tokens_at, max_tokens, at_once,
    MROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything before the tail, and the positions; the first `at_once` words come at the same time as the header."""
    header = ask_header(record, BLOCK)
    start, stride = place * BLOCK, places * BLOCK
    for first in range(start, at_once, stride):
        copy_words(staged, record, first, capacity, BLOCK)
    tokens = header_word(header, 1, max_tokens, BLOCK)
    for first in range(at_once + start, tokens_at + tokens, stride):
        copy_words(staged, record, first, (tokens_at + tokens + 15) // 16 * 16, BLOCK)
    if MROPE:
        at = header_word(header, 8, capacity, BLOCK)
        if (at > 0) & (at <= capacity - 3 * tokens):
            for first in range(at // 16 * 16 + start, at + 3 * tokens, stride):
                copy_words(staged, record, first, (at + 3 * tokens + 15) // 16 * 16, BLOCK)


@triton.jit
def ask_updates(record, tail, first, end, UPDATE: tl.constexpr, BLOCK: tl.constexpr):
    """Updates first .. end - 1, BLOCK at most."""
    number = first + tl.arange(0, BLOCK)[:, None]
    word = tl.arange(0, UPDATE)[None, :]
    return tl.load(record + tail + number * UPDATE + word, mask=number < end, other=-1, cache_modifier=".cv")


@triton.jit
def set_blocks(block_tables, entry, count, max_slots, max_blocks, UPDATE: tl.constexpr, BLOCK: tl.constexpr):
    """The first `count` of these updates."""
    word = tl.arange(0, UPDATE)[None, :]
    slot = tl.sum(tl.where(word == 0, entry, 0), 1)
    index = tl.sum(tl.where(word == 1, entry, 0), 1)
    block = tl.sum(tl.where(word == 2, entry, 0), 1)
    group = tl.sum(tl.where(word == 3, entry, 0), 1)
    inside = (slot >= 0) & (slot < max_slots) & (index >= 0) & (index < max_blocks)
    inside &= tl.arange(0, BLOCK) < count
    place = block_tables + slot.to(tl.int64) * max_blocks + index
    tl.store(place, tl.maximum(block, 0), mask=inside & (group == 0))


@triton.jit
def set_params(
    prompt_len, position_delta, temperature, top_k, top_p, min_p, seed, presence, frequency, repetition, outside,
    entry, inside, max_slots,
):  # fmt: skip
    """The words of a slot at each `entry`."""
    slot = tl.load(entry, mask=inside, other=-1, cache_modifier=".cv")
    inside = (slot >= 0) & (slot < max_slots)
    word1 = tl.load(entry + 1, mask=inside, cache_modifier=".cv")
    word2 = tl.load(entry + 2, mask=inside, cache_modifier=".cv")
    word3 = tl.load(entry + 3, mask=inside, cache_modifier=".cv")
    word4 = tl.load(entry + 4, mask=inside, cache_modifier=".cv")
    word5 = tl.load(entry + 5, mask=inside, cache_modifier=".cv")
    word6 = tl.load(entry + 6, mask=inside, cache_modifier=".cv")
    low = tl.load(entry + 7, mask=inside, cache_modifier=".cv")
    high = tl.load(entry + 8, mask=inside, cache_modifier=".cv")
    word9 = tl.load(entry + 9, mask=inside, cache_modifier=".cv")
    word10 = tl.load(entry + 10, mask=inside, cache_modifier=".cv")
    word11 = tl.load(entry + 11, mask=inside, cache_modifier=".cv")
    tl.store(prompt_len + slot, word1, mask=inside)
    tl.store(position_delta + slot, word2, mask=inside)
    tl.store(temperature + slot, word3.to(tl.float32, bitcast=True), mask=inside)
    tl.store(top_k + slot, word4, mask=inside)
    tl.store(top_p + slot, word5.to(tl.float32, bitcast=True), mask=inside)
    tl.store(min_p + slot, word6.to(tl.float32, bitcast=True), mask=inside)
    tl.store(seed + slot, (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32), mask=inside)
    tl.store(presence + slot, word9.to(tl.float32, bitcast=True), mask=inside)
    tl.store(frequency + slot, word10.to(tl.float32, bitcast=True), mask=inside)
    tl.store(repetition + slot, word11.to(tl.float32, bitcast=True), mask=inside)
    tl.store(outside + slot, 0, mask=inside)


@triton.jit
def record_kernel(
    staged,  # [capacity]
    block_tables,  # [max_slots + 1, max_blocks]
    prompt_len,  # [max_slots + 1], as are the next ten
    position_delta,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    presence,
    frequency,
    repetition,
    outside,
    pinned,  # [num_records, capacity], on the host
    turn,  # [1]
    num_records,
    capacity,
    tokens_at,  # where the tokens begin
    max_tokens,
    at_once,  # words that are copied whatever the header says
    tail,  # where the updates begin
    max_slots,
    max_blocks,
    MROPE: tl.constexpr,
    UPDATE: tl.constexpr,  # words of an update
    PARAMS: tl.constexpr,  # words of a slot's parameters
    COPIERS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first COPIERS programs copy, the others apply changes: no table entry and no slot is named twice."""
    grid_wait(OVERLAP)
    mine = tl.minimum(tl.maximum(tl.load(turn), 0), num_records - 1)
    record = pinned + mine.to(tl.int64) * capacity
    program = tl.program_id(0)
    if program < COPIERS:
        copy_record(staged, record, program, COPIERS, capacity, tokens_at, max_tokens, at_once, MROPE, WORDS)
    else:
        start, stride = (program - COPIERS) * BLOCK, (tl.num_programs(0) - COPIERS) * BLOCK
        header = ask_header(record, BLOCK)
        most = (capacity - tail) // UPDATE
        if start == 0:  # most steps have no more, and these come at the same time as the header
            entry = ask_updates(record, tail, 0, most, UPDATE, BLOCK)
            set_blocks(block_tables, entry, header_word(header, 3, most, BLOCK), max_slots, max_blocks, UPDATE, BLOCK)
            start = stride
        num_updates = header_word(header, 3, most, BLOCK)
        for first in range(start, num_updates, stride):
            entry = ask_updates(record, tail, first, num_updates, UPDATE, BLOCK)
            set_blocks(block_tables, entry, num_updates - first, max_slots, max_blocks, UPDATE, BLOCK)
        words = tail + num_updates * UPDATE
        num_params = header_word(header, 7, (capacity - words) // PARAMS, BLOCK)
        for first in range((program - COPIERS) * BLOCK, num_params, stride):
            number = first + tl.arange(0, BLOCK)
            set_params(
                prompt_len, position_delta, temperature, top_k, top_p, min_p, seed, presence, frequency, repetition,
                outside, record + words + number * PARAMS, number < num_params, max_slots,
            )  # fmt: skip


def take_record(slots: SlotTensors, records: Records, max_rows: int, max_tokens: int, mrope: bool) -> None:
    """Brings `slots` up to date from the next record and copies the rest of it to `records.staged`; the turn stays.

    `mrope`: with its positions. Capturable: the record's lengths are read on the device.
    """
    lines, max_blocks = slots.block_tables.shape
    count, capacity = records.pinned.shape
    tokens_at = tokens_of(max_rows)
    at_once = triton.cdiv(tokens_at + max_rows, WORDS) * WORDS  # a step that only decodes has one token per row
    record_kernel[(COPIERS + APPLIERS,)](
        records.staged, slots.block_tables, slots.prompt_len, slots.position_delta, slots.temperature, slots.top_k,
        slots.top_p, slots.min_p, slots.seed, slots.presence, slots.frequency, slots.repetition, slots.outside,
        records.pinned, records.turn, count, capacity, tokens_at, max_tokens, at_once, tail_of(max_rows, max_tokens),
        lines - 1, max_blocks,
        MROPE=mrope, UPDATE=UPDATE_WORDS, PARAMS=PARAM_WORDS, COPIERS=COPIERS, WORDS=WORDS, BLOCK=CHANGES,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def take_record_reference(slots: SlotTensors, record: Tensor, tail: int) -> None:
    dummy, max_blocks = slots.block_tables.shape[0] - 1, slots.block_tables.shape[1]
    num_updates = min(max(int(record[3]), 0), (record.numel() - tail) // UPDATE_WORDS)
    end = tail + num_updates * UPDATE_WORDS
    slot, index, block, group = record[tail:end].view(num_updates, UPDATE_WORDS).long().unbind(1)
    kept = (slot >= 0) & (slot < dummy) & (index >= 0) & (index < max_blocks) & (group == 0)
    slots.block_tables[slot[kept], index[kept]] = block[kept].clamp(min=0).to(torch.int32)
    num_params = min(max(int(record[7]), 0), (record.numel() - end) // PARAM_WORDS)
    words = record[end : end + num_params * PARAM_WORDS].view(num_params, PARAM_WORDS)
    words = words[(words[:, 0] >= 0) & (words[:, 0] < dummy)]
    slot, real = words[:, 0].long(), words.contiguous().view(torch.float32)
    for line, column in ((slots.prompt_len, 1), (slots.position_delta, 2), (slots.top_k, 4)):
        line[slot] = words[:, column]
    for line, column in (
        (slots.temperature, 3), (slots.top_p, 5), (slots.min_p, 6),
        (slots.presence, 9), (slots.frequency, 10), (slots.repetition, 11),
    ):  # fmt: skip
        line[slot] = real[:, column]
    slots.seed[slot] = (words[:, 7].long() & 0xFFFFFFFF) | (words[:, 8].long() << 32)
    slots.outside[slot] = 0
