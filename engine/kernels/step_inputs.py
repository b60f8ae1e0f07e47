"""From the record of a step to the fixed inputs of its graphs: what engine/step/build does on a CPU, on the device.

In: the staged record (layout in `_fast/plan.pyx`) and the lines of the slots. Out: the slots' lines brought up to date,
then every entry of StepInputs, the padding too, so nothing of an earlier step can be read. Two launches on fixed grids:

    state_kernel   block-table changes and changed sampling words -> SlotTensors
    inputs_kernel  program 0: rows and which of them are sampled; the others: token ids, positions, cache slots

Stagings take turns, counted here, so that a recorded step has no address of its own staging and need be recorded once.
Lengths come from the header and every number of the record is clamped to what it indexes. A token id that was outside
of the embedding marks its slot until the slot has other parameters: what it samples is nobody's (sampling/home). One
cache group (number 0) has a table here. Users: the prep graph of the device executor; thread: device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.overlap import begin, launch_options
from engine.kernels.target import tl, triton

HEADER_LEN = 16
AT_HOME = 10  # of the header
PARAM_WORDS = 12  # slot, prompt_len, position_delta, temperature, top_k, top_p, min_p, seed (2), three penalties
UPDATE_WORDS = 4  # slot, index, block, group
TOKENS = 128  # of one program
CHANGES = 256  # of one program and turn
STATE_PROGRAMS = 16


@dataclass(frozen=True, slots=True, eq=False)
class SlotTensors:
    """What the device keeps for each live request, by slot; line max_slots belongs to padded rows."""

    block_tables: Tensor  # [max_slots + 1, max_blocks] int32
    last_token: Tensor  # [max_slots + 1] int32, as are the next two: the newest sampled token
    prompt_len: Tensor
    position_delta: Tensor  # position of token i is i + delta (M-RoPE: beyond the prompt)
    temperature: Tensor  # [max_slots + 1] float32; 0 is greedy
    top_k: Tensor  # [max_slots + 1] int32
    top_p: Tensor  # [max_slots + 1] float32
    min_p: Tensor  # [max_slots + 1] float32
    seed: Tensor  # [max_slots + 1] int64
    presence: Tensor  # [max_slots + 1] float32, as are the next two
    frequency: Tensor
    repetition: Tensor
    outside: Tensor  # [max_slots + 1] int32; 1: one of its token ids was not a row of the embedding


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step as forward and sampler read it, at addresses that never change; N = max_tokens, R = max_rows."""

    token_ids: Tensor  # [N] int64, rows of the embedding; 0 beyond the step's tokens
    positions: Tensor  # [N] int64, or [3, N] for M-RoPE; 0 beyond
    slot_mapping: Tensor  # [N] int64, block * block_size + offset; -1 beyond
    query_start: Tensor  # [R + 1] int32; the number of tokens beyond the step's rows
    context_len: Tensor  # [R] int32; 0 beyond
    row_slot: Tensor  # [R] int32; max_slots beyond
    sample_index: Tensor  # [R] int64, the last token of each sampled row, rows ascending; 0 beyond
    sample_row: Tensor  # [R] int32; -1 beyond the sampled rows
    sample_slot: Tensor  # [R] int32; max_slots beyond
    sample_place: Tensor  # [R] int32, the number of the token in the answer; 0 beyond
    num_rows: Tensor  # [1] int32
    num_sampled: Tensor  # [1] int32
    home: Tensor  # [1] int32: the number of the buffer on the host that the tokens go to


@dataclass(frozen=True, slots=True, eq=False)
class Stagings:
    """Where records arrive, one step after the other in turn."""

    records: Tensor  # [num_stagings, capacity] int32
    turn: Tensor  # [2] int32: the staging that state_kernel reads next, and the one that inputs_kernel does


def empty_stagings(count: int, capacity: int, device: str | torch.device) -> Stagings:
    """The first one is next."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    return Stagings(zeros(count, capacity), zeros(2))


def empty_slots(max_slots: int, max_blocks: int, device: str | torch.device) -> SlotTensors:
    """All lines zero."""

    def line(dtype: torch.dtype) -> Tensor:
        return torch.zeros(max_slots + 1, dtype=dtype, device=device)

    tables = torch.zeros(max_slots + 1, max_blocks, dtype=torch.int32, device=device)
    whole, real = torch.int32, torch.float32
    return SlotTensors(
        tables, line(whole), line(whole), line(whole), line(real), line(whole), line(real), line(real),
        line(torch.int64), line(real), line(real), line(real), line(whole),
    )  # fmt: skip


def empty_inputs(max_rows: int, max_tokens: int, mrope: bool, device: str | torch.device) -> StepInputs:
    """A step without rows, but for the slots of padded rows, which are 0 until the first `step_inputs`."""
    positions = torch.zeros((3, max_tokens) if mrope else max_tokens, dtype=torch.int64, device=device)

    def row(count: int = max_rows, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((count,), fill, dtype=dtype, device=device)

    return StepInputs(
        token_ids=row(max_tokens, 0, torch.int64),
        positions=positions,
        slot_mapping=row(max_tokens, -1, torch.int64),
        query_start=row(max_rows + 1),
        context_len=row(),
        row_slot=row(),
        sample_index=row(dtype=torch.int64),
        sample_row=row(fill=-1),
        sample_slot=row(),
        sample_place=row(),
        num_rows=row(1),
        num_sampled=row(1),
        home=row(1),
    )


@triton.jit
def state_kernel(
    block_tables,  # [max_slots + 1, max_blocks]
    prompt_len,  # [max_slots + 1], as are all others
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
    stagings,  # [num_stagings, capacity]
    turn,  # [2]
    num_stagings,
    capacity,
    tail,  # where the updates begin
    max_slots,
    max_blocks,
    UPDATE: tl.constexpr,  # words of an update
    PARAMS: tl.constexpr,  # words of a slot's parameters
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Updates and parameters, BLOCK of them at a time; the scheduler names no table entry and no slot twice."""
    begin(OVERLAP)
    mine = tl.minimum(tl.maximum(tl.load(turn), 0), num_stagings - 1)
    if tl.program_id(0) == 0:
        tl.store(turn + 1, mine)  # for inputs_kernel, which counts on while nobody reads the first number
    staging = stagings + mine.to(tl.int64) * capacity
    start, stride = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    num_updates = tl.minimum(tl.maximum(tl.load(staging + 3), 0), (capacity - tail) // UPDATE)
    for first in range(start, num_updates, stride):
        inside = first + lane < num_updates
        entry = staging + tail + (first + lane) * UPDATE
        slot = tl.load(entry, mask=inside, other=-1)
        index = tl.load(entry + 1, mask=inside, other=-1)
        block = tl.load(entry + 2, mask=inside, other=0)
        group = tl.load(entry + 3, mask=inside, other=-1)
        inside = (slot >= 0) & (slot < max_slots) & (index >= 0) & (index < max_blocks) & (group == 0)
        tl.store(block_tables + slot.to(tl.int64) * max_blocks + index, tl.maximum(block, 0), mask=inside)
    words = tail + num_updates * UPDATE
    num_params = tl.minimum(tl.maximum(tl.load(staging + 7), 0), (capacity - words) // PARAMS)
    for first in range(start, num_params, stride):
        inside = first + lane < num_params
        entry = staging + words + (first + lane) * PARAMS
        slot = tl.load(entry, mask=inside, other=-1)
        inside = (slot >= 0) & (slot < max_slots)
        tl.store(prompt_len + slot, tl.load(entry + 1, mask=inside), mask=inside)
        tl.store(position_delta + slot, tl.load(entry + 2, mask=inside), mask=inside)
        tl.store(temperature + slot, tl.load(entry + 3, mask=inside).to(tl.float32, bitcast=True), mask=inside)
        tl.store(top_k + slot, tl.load(entry + 4, mask=inside), mask=inside)
        tl.store(top_p + slot, tl.load(entry + 5, mask=inside).to(tl.float32, bitcast=True), mask=inside)
        tl.store(min_p + slot, tl.load(entry + 6, mask=inside).to(tl.float32, bitcast=True), mask=inside)
        low = tl.load(entry + 7, mask=inside).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(entry + 8, mask=inside).to(tl.int64)
        tl.store(seed + slot, low | (high << 32), mask=inside)
        tl.store(presence + slot, tl.load(entry + 9, mask=inside).to(tl.float32, bitcast=True), mask=inside)
        tl.store(frequency + slot, tl.load(entry + 10, mask=inside).to(tl.float32, bitcast=True), mask=inside)
        tl.store(repetition + slot, tl.load(entry + 11, mask=inside).to(tl.float32, bitcast=True), mask=inside)
        tl.store(outside + slot, 0, mask=inside)


@triton.jit
def fill_rows(
    query_start, context_len, row_slot, sample_index, sample_row, sample_slot, sample_place, num_rows, num_sampled,
    home, prompt_len, staging, max_rows, max_tokens, max_slots, longest,
    ROWS: tl.constexpr,  # power of two > max_rows
):  # fmt: skip
    """All rows side by side; a running count says where a sampled row goes."""
    rows = tl.minimum(tl.maximum(tl.load(staging), 0), max_rows)
    tokens = tl.minimum(tl.maximum(tl.load(staging + 1), 0), max_tokens)
    row = tl.arange(0, ROWS)
    room, here = row < max_rows, row < rows
    record = staging + 16 + row
    slot = tl.load(record, mask=here, other=max_slots)
    slot = tl.where((slot >= 0) & (slot < max_slots), slot, max_slots)
    start = tl.load(record + max_rows, mask=row <= rows, other=0)
    length = tl.load(record + 2 * max_rows + 1, mask=here, other=0)
    computed = tl.load(record + 3 * max_rows + 1, mask=here, other=0)
    flags = tl.load(record + 4 * max_rows + 1, mask=here, other=0)
    start = tl.where(row <= rows, tl.minimum(tl.maximum(start, 0), tokens), tokens)
    context = tl.minimum(tl.maximum(computed + length, 0), longest)
    tl.store(query_start + row, start, mask=row <= max_rows)
    tl.store(context_len + row, context, mask=room)
    tl.store(row_slot + row, slot, mask=room)
    sampled = (flags & 1) * here.to(tl.int32)
    count = tl.sum(sampled, 0)
    place = tl.cumsum(sampled, 0) - 1
    chosen = sampled == 1
    number = tl.maximum(computed + length - tl.load(prompt_len + slot, mask=here, other=0), 0)
    last = tl.minimum(tl.maximum(start + length - 1, 0), max_tokens - 1)
    tl.store(sample_index + place, last.to(tl.int64), mask=chosen)
    tl.store(sample_row + place, row, mask=chosen)
    tl.store(sample_slot + place, slot, mask=chosen)
    tl.store(sample_place + place, number, mask=chosen)
    beyond = room & (row >= count)
    none = tl.zeros([ROWS], tl.int32)
    tl.store(sample_index + row, none.to(tl.int64), mask=beyond)
    tl.store(sample_row + row, none - 1, mask=beyond)
    tl.store(sample_slot + row, none + max_slots, mask=beyond)
    tl.store(sample_place + row, none, mask=beyond)
    tl.store(num_rows, rows)
    tl.store(num_sampled, count)
    tl.store(home, tl.load(staging + 10))


@triton.jit
def fill_tokens(
    token_ids, positions, slot_mapping, outside, block_tables, last_token, prompt_len, position_delta, staging,
    capacity, first, max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings,
    MROPE: tl.constexpr,
    STEPS: tl.constexpr,  # 2 ** STEPS > max_rows
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens: each finds its row by bisection of row_start, then its place in the sequence."""
    rows = tl.minimum(tl.maximum(tl.load(staging), 0), max_rows)
    tokens = tl.minimum(tl.maximum(tl.load(staging + 1), 0), max_tokens) * (rows > 0).to(tl.int32)
    token = first + tl.arange(0, BLOCK)
    room, here = token < max_tokens, token < tokens
    record = staging + 16
    row = tl.zeros([BLOCK], tl.int32)  # the last one that begins at or before the token
    for step in tl.static_range(STEPS):
        next_row = row + (1 << (STEPS - 1 - step))
        begin = tl.load(record + max_rows + next_row, mask=here & (next_row < rows), other=0x7FFFFFFF)
        row = tl.where(begin <= token, next_row, row)
    slot = tl.load(record + row, mask=here, other=max_slots)
    slot = tl.where((slot >= 0) & (slot < max_slots), slot, max_slots)
    begin = tl.load(record + max_rows + row, mask=here, other=0)
    computed = tl.load(record + 3 * max_rows + 1 + row, mask=here, other=0)
    flags = tl.load(record + 4 * max_rows + 1 + row, mask=here, other=0)
    name = tl.load(record + 5 * max_rows + 1 + token, mask=here, other=0)
    fed = here & ((flags & 2) != 0) & (token == begin)
    name = tl.where(fed, tl.load(last_token + slot, mask=fed, other=0), name)
    tl.store(outside + slot, 1, mask=(slot < max_slots) & ((name < 0) | (name >= num_embeddings)))
    tl.store(token_ids + token, tl.minimum(tl.maximum(name, 0), num_embeddings - 1).to(tl.int64), mask=room)
    index = computed + token - begin
    within = here & (index >= 0) & (index < max_blocks * block_size)
    entry = block_tables + slot.to(tl.int64) * max_blocks + index // block_size
    block = tl.load(entry, mask=within, other=-1).to(tl.int64)
    mapping = tl.where(within & (block >= 0), block * block_size + index % block_size, -1)
    tl.store(slot_mapping + token, mapping, mask=room)
    moved = index + tl.load(position_delta + slot, mask=here, other=0)
    if MROPE:
        prompt_end = tl.load(prompt_len + slot, mask=here, other=0)
        at = tl.load(staging + 8)
        has = (at > 0) & (at <= capacity - 3 * tokens)
        given = here & (index < prompt_end * has.to(tl.int32))
        moved = tl.where(index < prompt_end, index, moved)
        for axis in tl.static_range(3):
            position = tl.load(staging + at + axis * tokens + token, mask=given, other=0)
            position = tl.where(given, position, moved)
            position = tl.where(here, tl.maximum(position, 0), 0)
            tl.store(positions + axis * max_tokens + token, position.to(tl.int64), mask=room)
    else:
        tl.store(positions + token, tl.where(here, tl.maximum(moved, 0), 0).to(tl.int64), mask=room)


@triton.jit
def inputs_kernel(
    token_ids, positions, slot_mapping, query_start, context_len, row_slot,
    sample_index, sample_row, sample_slot, sample_place, num_rows, num_sampled, home,  # StepInputs
    outside, block_tables, last_token, prompt_len, position_delta,  # of SlotTensors
    stagings,  # [num_stagings, capacity]
    turn,  # [2]
    num_stagings, capacity, max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings,
    MROPE: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program 0 writes what is by row, each other program BLOCK tokens."""
    begin(OVERLAP)
    program = tl.program_id(0)
    mine = tl.minimum(tl.maximum(tl.load(turn + 1), 0), num_stagings - 1)
    staging = stagings + mine.to(tl.int64) * capacity
    if program == 0:
        tl.store(turn, tl.where(mine + 1 < num_stagings, mine + 1, 0))
        fill_rows(
            query_start, context_len, row_slot, sample_index, sample_row, sample_slot, sample_place, num_rows,
            num_sampled, home, prompt_len, staging, max_rows, max_tokens, max_slots, max_blocks * block_size, ROWS,
        )  # fmt: skip
    else:
        fill_tokens(
            token_ids, positions, slot_mapping, outside, block_tables, last_token, prompt_len, position_delta, staging,
            capacity, (program - 1) * BLOCK, max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings,
            MROPE, STEPS, BLOCK,
        )  # fmt: skip


def step_inputs(
    out: StepInputs,
    slots: SlotTensors,
    stagings: Stagings,
    max_rows: int,
    max_tokens: int,
    block_size: int,
    num_embeddings: int,
) -> None:
    """Brings `slots` up to date and rewrites all of `out` from the record in the next staging, whose turn is over then.

    max_rows and max_tokens are those of the plan whose record it is, and of `out`; num_embeddings are the rows that
    token ids name. Capturable: the record's lengths are read on the device.
    """
    records = stagings.records
    assert records.dtype is torch.int32 and records.dim() == 2 and records.is_contiguous()
    assert records.shape[1] >= tail_of(max_rows, max_tokens), (
        f"a staging holds {records.shape[1]} values; a record of {max_rows} rows and {max_tokens} tokens needs "
        f"{tail_of(max_rows, max_tokens)} at least"
    )
    assert out.row_slot.numel() == max_rows and out.token_ids.numel() == max_tokens, "out is of another size"
    if records.is_cuda:
        launch_inputs(out, slots, stagings, max_rows, max_tokens, block_size, num_embeddings)
    else:
        step_inputs_reference(out, slots, stagings, max_rows, max_tokens, block_size, num_embeddings)


def tail_of(max_rows: int, max_tokens: int) -> int:
    """Where the updates of a record begin."""
    return HEADER_LEN + 5 * max_rows + 1 + max_tokens


def launch_inputs(
    out: StepInputs,
    slots: SlotTensors,
    stagings: Stagings,
    max_rows: int,
    max_tokens: int,
    block_size: int,
    num_embeddings: int,
) -> None:
    """The two Triton kernels; arguments as `step_inputs`."""
    lines, max_blocks = slots.block_tables.shape
    count, capacity = stagings.records.shape
    state_kernel[(STATE_PROGRAMS,)](
        slots.block_tables, slots.prompt_len, slots.position_delta, slots.temperature, slots.top_k, slots.top_p,
        slots.min_p, slots.seed, slots.presence, slots.frequency, slots.repetition, slots.outside,
        stagings.records, stagings.turn, count, capacity, tail_of(max_rows, max_tokens), lines - 1, max_blocks,
        UPDATE=UPDATE_WORDS, PARAMS=PARAM_WORDS, BLOCK=CHANGES, num_warps=4, **launch_options(),
    )  # fmt: skip
    rows = triton.next_power_of_2(max_rows + 1)
    inputs_kernel[(1 + triton.cdiv(max_tokens, TOKENS),)](
        out.token_ids, out.positions, out.slot_mapping, out.query_start, out.context_len, out.row_slot,
        out.sample_index, out.sample_row, out.sample_slot, out.sample_place, out.num_rows, out.num_sampled,
        out.home, slots.outside, slots.block_tables, slots.last_token, slots.prompt_len, slots.position_delta,
        stagings.records, stagings.turn, count, capacity, max_rows, max_tokens, lines - 1, max_blocks, block_size,
        num_embeddings, MROPE=out.positions.dim() == 2, ROWS=rows, STEPS=max_rows.bit_length(), BLOCK=TOKENS,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def step_inputs_reference(
    out: StepInputs,
    slots: SlotTensors,
    stagings: Stagings,
    max_rows: int,
    max_tokens: int,
    block_size: int,
    num_embeddings: int,
) -> None:
    mine = min(max(int(stagings.turn[0]), 0), len(stagings.records) - 1)
    stagings.turn[0], stagings.turn[1] = (mine + 1) % len(stagings.records), mine
    staging = stagings.records[mine]
    _apply_reference(slots, staging, tail_of(max_rows, max_tokens))
    dummy, max_blocks = slots.block_tables.shape[0] - 1, slots.block_tables.shape[1]
    rows = min(max(int(staging[0]), 0), max_rows)
    tokens = min(max(int(staging[1]), 0), max_tokens) if rows else 0
    columns = staging[HEADER_LEN:].split(
        [max_rows, max_rows + 1, max_rows, max_rows, max_rows, staging.numel() - HEADER_LEN - 5 * max_rows - 1]
    )
    slot = columns[0][:rows].long()
    slot = torch.where((slot >= 0) & (slot < dummy), slot, dummy)
    start = columns[1][: rows + 1].long().clamp(0, tokens)
    length, computed, flags = (column[:rows].long() for column in columns[2:5])
    _fill(out.query_start, start, tokens)
    _fill(out.context_len, (computed + length).clamp(0, max_blocks * block_size), 0)
    _fill(out.row_slot, slot, dummy)
    sampled = ((flags & 1) != 0).nonzero().flatten()
    _fill(out.sample_index, (start[:-1] + length - 1).clamp(0, max_tokens - 1)[sampled], 0)
    _fill(out.sample_row, sampled, -1)
    _fill(out.sample_slot, slot[sampled], dummy)
    _fill(out.sample_place, (computed + length - slots.prompt_len[slot]).clamp(min=0)[sampled], 0)
    out.num_rows.fill_(rows)
    out.num_sampled.fill_(len(sampled))
    out.home.fill_(staging[AT_HOME])

    token = torch.arange(tokens, device=staging.device)
    row = (torch.searchsorted(start[:-1].contiguous(), token, right=True) - 1).clamp(min=0)
    slot = slot[row]
    index = computed[row] + token - start[row]
    given = columns[5][:tokens].long()
    fed = ((flags[row] & 2) != 0) & (token == start[row])
    name = torch.where(fed, slots.last_token[slot].long(), given)
    slots.outside[slot[(slot < dummy) & ((name < 0) | (name >= num_embeddings))]] = 1
    _fill(out.token_ids, name.clamp(0, num_embeddings - 1), 0)
    block = slots.block_tables[slot, (index // block_size).clamp(0, max_blocks - 1)].long()
    within = (index >= 0) & (index < max_blocks * block_size) & (block >= 0)
    _fill(out.slot_mapping, torch.where(within, block * block_size + index % block_size, -1), -1)
    position = index + slots.position_delta[slot]
    if out.positions.dim() == 2:
        at = int(staging[8])
        has = 0 < at <= staging.numel() - 3 * tokens
        prompt = staging[at : at + 3 * tokens].view(3, tokens).long() if has else index.expand(3, tokens)
        position = torch.where(index < slots.prompt_len[slot], prompt, position)
    out.positions.zero_()
    out.positions[..., :tokens] = position.clamp(min=0)


def _apply_reference(slots: SlotTensors, staging: Tensor, tail: int) -> None:
    dummy, max_blocks = slots.block_tables.shape[0] - 1, slots.block_tables.shape[1]
    num_updates = min(max(int(staging[3]), 0), (staging.numel() - tail) // UPDATE_WORDS)
    end = tail + num_updates * UPDATE_WORDS
    slot, index, block, group = staging[tail:end].view(num_updates, UPDATE_WORDS).long().unbind(1)
    kept = (slot >= 0) & (slot < dummy) & (index >= 0) & (index < max_blocks) & (group == 0)
    slots.block_tables[slot[kept], index[kept]] = block[kept].clamp(min=0).to(torch.int32)
    num_params = min(max(int(staging[7]), 0), (staging.numel() - end) // PARAM_WORDS)
    words = staging[end : end + num_params * PARAM_WORDS].view(num_params, PARAM_WORDS)
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


def _fill(line: Tensor, values: Tensor, beyond: int) -> None:
    line.fill_(beyond)
    line[: len(values)] = values.to(line.dtype)
