"""From the record of a step to the fixed inputs of its graphs: what engine/step/build does on a CPU, on the device.

In: the next record in pinned memory of the host (layout in `_fast/plan.pyx`) and the lines of the slots. Out: the
slots' lines brought up to date, then every entry of StepInputs, the padding too, so nothing of an earlier step can be
read.
Two launches on fixed grids:

    record_kernel  (engine/kernels/record) the record from the host; the slots' changes
    inputs_kernel  program 0: rows and which of them are sampled; the others: token ids, positions, cache slots

Lengths come from the header and every number is clamped to what it indexes. A token id that was outside of the
embedding marks its slot until the slot has other parameters: what it samples is nobody's (sampling/home). One cache
group (number 0) has a table here. Users: the prep graph of the device executor; thread: device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.record import ALIGNED, HEADER_LEN, Records, tail_of, take_record, take_record_reference
from engine.kernels.target import tl, triton

AT_HOME = 10  # of the header
TOKENS = 128  # of one program


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
def fill_rows(
    query_start, context_len, row_slot, sample_index, sample_row, sample_slot, sample_place, num_rows, num_sampled,
    home, prompt_len, staged, max_rows, max_tokens, max_slots, longest,
    ROWS: tl.constexpr,  # power of two > max_rows
):  # fmt: skip
    """All rows side by side; a running count says where a sampled row goes."""
    rows = tl.minimum(tl.maximum(tl.load(staged), 0), max_rows)
    tokens = tl.minimum(tl.maximum(tl.load(staged + 1), 0), max_tokens)
    row = tl.arange(0, ROWS)
    room, here = row < max_rows, row < rows
    record = staged + 16 + row
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
    tl.store(home, tl.load(staged + 10))


@triton.jit
def fill_tokens(
    token_ids, positions, slot_mapping, outside, block_tables, last_token, prompt_len, position_delta, staged,
    capacity, first, max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings,
    MROPE: tl.constexpr,
    STEPS: tl.constexpr,  # 2 ** STEPS > max_rows
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens: each finds its row by bisection of row_start, then its place in the sequence."""
    rows = tl.minimum(tl.maximum(tl.load(staged), 0), max_rows)
    tokens = tl.minimum(tl.maximum(tl.load(staged + 1), 0), max_tokens) * (rows > 0).to(tl.int32)
    token = first + tl.arange(0, BLOCK)
    room, here = token < max_tokens, token < tokens
    record = staged + 16
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
        at = tl.load(staged + 8)
        has = (at > 0) & (at <= capacity - 3 * tokens)
        given = here & (index < prompt_end * has.to(tl.int32))
        moved = tl.where(index < prompt_end, index, moved)
        for axis in tl.static_range(3):
            position = tl.load(staged + at + axis * tokens + token, mask=given, other=0)
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
    staged,  # [capacity]
    turn,  # [1]
    num_records, capacity, max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings,
    MROPE: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program 0 writes what is by row, and whose turn is next; each other program BLOCK tokens."""
    grid_wait(OVERLAP)
    program = tl.program_id(0)
    if program == 0:
        mine = tl.minimum(tl.maximum(tl.load(turn), 0), num_records - 1)
        tl.store(turn, tl.where(mine + 1 < num_records, mine + 1, 0))
        fill_rows(
            query_start, context_len, row_slot, sample_index, sample_row, sample_slot, sample_place, num_rows,
            num_sampled, home, prompt_len, staged, max_rows, max_tokens, max_slots, max_blocks * block_size, ROWS,
        )  # fmt: skip
    else:
        fill_tokens(
            token_ids, positions, slot_mapping, outside, block_tables, last_token, prompt_len, position_delta, staged,
            capacity, (program - 1) * BLOCK, max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings,
            MROPE, STEPS, BLOCK,
        )  # fmt: skip


def step_inputs(
    out: StepInputs,
    slots: SlotTensors,
    records: Records,
    max_rows: int,
    max_tokens: int,
    block_size: int,
    num_embeddings: int,
) -> None:
    """Brings `slots` up to date and rewrites all of `out` from the next record, whose turn is over then.

    max_rows and max_tokens are those of the plan whose record it is, and of `out`; num_embeddings are the rows that
    token ids name. Capturable: the record's lengths are read on the device.
    """
    pinned, least = records.pinned, tail_of(max_rows, max_tokens)
    assert pinned.dtype is torch.int32 and pinned.dim() == 2 and pinned.is_contiguous()
    assert pinned.shape[1] >= least and pinned.shape[1] % ALIGNED == 0, (
        f"a record of {pinned.shape[1]} values: {max_rows} rows and {max_tokens} tokens need {least} at least, and "
        f"records begin at multiples of {ALIGNED}"
    )
    assert out.row_slot.numel() == max_rows and out.token_ids.numel() == max_tokens, "out is of another size"
    if records.staged.is_cuda:
        launch_inputs(out, slots, records, max_rows, max_tokens, block_size, num_embeddings)
    else:
        step_inputs_reference(out, slots, records, max_rows, max_tokens, block_size, num_embeddings)


def launch_inputs(
    out: StepInputs,
    slots: SlotTensors,
    records: Records,
    max_rows: int,
    max_tokens: int,
    block_size: int,
    num_embeddings: int,
) -> None:
    """The two Triton kernels; arguments as `step_inputs`."""
    lines, max_blocks = slots.block_tables.shape
    count, capacity = records.pinned.shape
    mrope = out.positions.dim() == 2
    take_record(slots, records, max_rows, max_tokens, mrope)
    rows = triton.next_power_of_2(max_rows + 1)
    inputs_kernel[(1 + triton.cdiv(max_tokens, TOKENS),)](
        out.token_ids, out.positions, out.slot_mapping, out.query_start, out.context_len, out.row_slot,
        out.sample_index, out.sample_row, out.sample_slot, out.sample_place, out.num_rows, out.num_sampled,
        out.home, slots.outside, slots.block_tables, slots.last_token, slots.prompt_len, slots.position_delta,
        records.staged, records.turn, count, capacity, max_rows, max_tokens, lines - 1, max_blocks, block_size,
        num_embeddings, MROPE=mrope, ROWS=rows, STEPS=max_rows.bit_length(), BLOCK=TOKENS,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def step_inputs_reference(
    out: StepInputs,
    slots: SlotTensors,
    records: Records,
    max_rows: int,
    max_tokens: int,
    block_size: int,
    num_embeddings: int,
) -> None:
    mine = min(max(int(records.turn), 0), len(records.pinned) - 1)
    records.turn.fill_((mine + 1) % len(records.pinned))
    record = records.pinned[mine].to(records.staged.device)
    take_record_reference(slots, record, tail_of(max_rows, max_tokens))
    dummy, max_blocks = slots.block_tables.shape[0] - 1, slots.block_tables.shape[1]
    rows = min(max(int(record[0]), 0), max_rows)
    tokens = min(max(int(record[1]), 0), max_tokens) if rows else 0
    columns = record[HEADER_LEN:].split(
        [max_rows, max_rows + 1, max_rows, max_rows, max_rows, record.numel() - HEADER_LEN - 5 * max_rows - 1]
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
    out.home.fill_(record[AT_HOME])

    token = torch.arange(tokens, device=record.device)
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
        at = int(record[8])
        has = 0 < at <= record.numel() - 3 * tokens
        prompt = record[at : at + 3 * tokens].view(3, tokens).long() if has else index.expand(3, tokens)
        position = torch.where(index < slots.prompt_len[slot], prompt, position)
    out.positions.zero_()
    out.positions[..., :tokens] = position.clamp(min=0)


def _fill(line: Tensor, values: Tensor, beyond: int) -> None:
    line.fill_(beyond)
    line[: len(values)] = values.to(line.dtype)
