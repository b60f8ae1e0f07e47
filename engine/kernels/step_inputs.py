"""Conversion of a step's record to the fixed inputs of its graphs, on the device (on a CPU: backend/host/buffers).

In: the next record in pinned host memory (layout: `_fast/layout.py`) and the slots' rows. Out: updated rows of slots,
and every entry of StepInputs, including padding, so that no value of an earlier step can be read.
Two launches on fixed grids, and one between them in steps with drafts (engine/kernels/deal_drafts):

    record_kernel  (engine/kernels/record) reads the record from the host; applies the slots' changes
    inputs_kernel  program 0: rows and sampled rows; other programs: token ids, positions, cache slots

Lengths come from the header, and every number is clamped to the size of what it indexes. A token id outside of the
embedding marks its slot until the slot gets a new row of words; sampling/home replaces the sampled tokens of a marked
slot. Users: the prep graph of the device executor; thread: device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import ALIGNED, HEADER_LEN, Header, RowColumn, RowFlag, SlotWord, column_at, tail_at, tokens_at
from engine.kernels.deal_drafts import deal_drafts_reference, launch_deal_drafts
from engine.kernels.fed_rows import fill, fill_lines_reference, find_rows, first_place, resolve, resolve_reference
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.record import Records, take_record, take_record_reference
from engine.kernels.step_tensors import SlotTensors, StepInputs, word
from engine.kernels.target import tl, triton

HEAD = tl.constexpr(HEADER_LEN)
NUM_ROWS = tl.constexpr(int(Header.NUM_ROWS))
NUM_TOKENS = tl.constexpr(int(Header.NUM_TOKENS))
POSITIONS_AT = tl.constexpr(int(Header.POSITIONS_AT))
HOME = tl.constexpr(int(Header.HOME))
COLUMNS = tl.constexpr(len(RowColumn))
SLOT, START, LEN, COMPUTED, FLAGS = (tl.constexpr(int(one)) for one in RowColumn)
SAMPLE = tl.constexpr(int(RowFlag.SAMPLE))
FEED = tl.constexpr(int(RowFlag.FEED))
PROMPT_LEN = tl.constexpr(int(SlotWord.PROMPT_LEN))
POSITION_DELTA = tl.constexpr(int(SlotWord.POSITION_DELTA))
LAST_TOKEN = tl.constexpr(int(SlotWord.LAST_TOKEN))
OUTSIDE = tl.constexpr(int(SlotWord.OUTSIDE))
LAST_PLACE = tl.constexpr(int(SlotWord.LAST_PLACE))
ADAPTER = tl.constexpr(int(SlotWord.ADAPTER))
TOKENS = 128  # per program


@triton.jit
def fill_rows(
    query_start, context_len, row_slot, sample_index, sample_row, sample_slot, sample_place, num_rows, num_sampled,
    home, row_drafts, words, staged, max_rows, max_tokens, max_slots, longest, max_lines,
    ROWS: tl.constexpr,  # power of two > max_rows
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Fill all rows in parallel; a cumulative count gives the place of each sampled row."""
    rows = tl.minimum(tl.maximum(tl.load(staged + NUM_ROWS), 0), max_rows)
    tokens = tl.minimum(tl.maximum(tl.load(staged + NUM_TOKENS), 0), max_tokens)
    row = tl.arange(0, ROWS)
    room, here = row < max_rows, row < rows
    record, column = staged + HEAD + row, max_rows + 1
    slot = tl.load(record + SLOT * column, mask=here, other=max_slots)
    slot = tl.where((slot >= 0) & (slot < max_slots), slot, max_slots)
    start = tl.load(record + START * column, mask=row <= rows, other=0)
    length = tl.load(record + LEN * column, mask=here, other=0)
    computed = tl.load(record + COMPUTED * column, mask=here, other=0)
    flags = tl.load(record + FLAGS * column, mask=here, other=0)
    if row_drafts is not None:
        length, computed, drafts = resolve(words, slot, flags, length, computed, here, max_tokens)
        start = tl.cumsum(length, 0) - length
        tokens = tl.minimum(tl.sum(length, 0), tokens)
    start = tl.where(row <= rows, tl.minimum(tl.maximum(start, 0), tokens), tokens)
    context = tl.minimum(tl.maximum(computed + length, 0), longest)
    tl.store(query_start + row, start, mask=row <= max_rows)
    tl.store(context_len + row, context, mask=room)
    tl.store(row_slot + row, slot, mask=room)
    sampled = ((flags & SAMPLE) != 0).to(tl.int32) * here.to(tl.int32)
    number = computed + length - tl.load(word(words, slot, PROMPT_LEN), mask=here, other=0)
    last = start + length - 1
    if row_drafts is None:
        place = tl.cumsum(sampled, 0) - 1
        fill_lines(sample_index, sample_row, sample_slot, sample_place, place, last, row * WIDTH, slot, number,
                   sampled == 1, max_tokens)  # fmt: skip
        count = tl.sum(sampled, 0)
    else:
        lines = sampled * (1 + drafts)
        first = tl.cumsum(lines, 0) - lines
        tl.store(row_drafts + row, tl.where(sampled == 1, drafts, -1), mask=room)
        for k in range(tl.max(lines, 0)):
            chosen = (k < lines) & (first + k < max_lines)
            fill_lines(sample_index, sample_row, sample_slot, sample_place, first + k, last - drafts + k,
                       row * WIDTH + k, slot, number - drafts + k, chosen, max_tokens)  # fmt: skip
        count = tl.minimum(tl.sum(lines, 0), max_lines)
    none = tl.zeros([ROWS], tl.int32)
    for begin in range(0, max_lines, ROWS):
        line = begin + row
        beyond = (line >= count) & (line < max_lines)
        tl.store(sample_index + line, none.to(tl.int64), mask=beyond)
        tl.store(sample_row + line, none - 1, mask=beyond)
        tl.store(sample_slot + line, none + max_slots, mask=beyond)
        tl.store(sample_place + line, none, mask=beyond)
    tl.store(num_rows, rows)
    tl.store(num_sampled, count)
    tl.store(home, tl.load(staged + HOME))


@triton.jit
def fill_lines(sample_index, sample_row, sample_slot, sample_place, line, token, place, slot, number, mask, max_tokens):
    """Write a line for each of some rows."""
    token = tl.minimum(tl.maximum(token, 0), max_tokens - 1)
    tl.store(sample_index + line, token.to(tl.int64), mask=mask)
    tl.store(sample_row + line, place, mask=mask)
    tl.store(sample_slot + line, slot, mask=mask)
    tl.store(sample_place + line, tl.maximum(number, 0), mask=mask)


@triton.jit
def fill_tokens(
    token_ids, positions, slot_mapping, last_keys, adapters, words, block_tables, drafts, staged, capacity, first,
    max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings,
    NUM: tl.constexpr,  # most drafts of a slot
    GROUPS: tl.constexpr,
    AXES: tl.constexpr,  # rows of positions
    STEPS: tl.constexpr,  # 2 ** STEPS > max_rows
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill BLOCK tokens: each finds its row by bisection of row_start, then its place in the sequence.

    Steps with runs have fewer tokens than planned if the device has fewer drafts. Only rows with drafts come after rows
    with drafts, so all other tokens have their planned places.
    """
    rows = tl.minimum(tl.maximum(tl.load(staged + NUM_ROWS), 0), max_rows)
    tokens = tl.minimum(tl.maximum(tl.load(staged + NUM_TOKENS), 0), max_tokens) * (rows > 0).to(tl.int32)
    planned, token = tokens, first + tl.arange(0, BLOCK)
    record, column = staged + HEAD, max_rows + 1
    starts = record + START * column
    if drafts is not None:
        row, begin, total = find_rows(token, words, staged, rows, max_rows, max_tokens, max_slots, BLOCK)
        tokens = tl.minimum(total, tokens)
        room, here = token < max_tokens, token < tokens
    else:
        room, here = token < max_tokens, token < tokens
        row = tl.zeros([BLOCK], tl.int32)  # the last row that begins at or before the token
        for step in tl.static_range(STEPS):
            next_row = row + (1 << (STEPS - 1 - step))
            begin = tl.load(starts + next_row, mask=here & (next_row < rows), other=0x7FFFFFFF)
            row = tl.where(begin <= token, next_row, row)
        begin = tl.load(starts + row, mask=here, other=0)
    slot = tl.load(record + SLOT * column + row, mask=here, other=max_slots)
    slot = tl.where((slot >= 0) & (slot < max_slots), slot, max_slots)
    computed = tl.load(record + COMPUTED * column + row, mask=here, other=0)
    flags = tl.load(record + FLAGS * column + row, mask=here, other=0)
    name = tl.load(record + COLUMNS * column + token, mask=here, other=0)
    fed = here & ((flags & FEED) != 0)
    newest = fed & (token == begin)
    name = tl.where(newest, tl.load(word(words, slot, LAST_TOKEN), mask=newest, other=0), name)
    if drafts is not None:
        computed = first_place(words, slot, flags, computed, fed)
        guessed = fed & (token > begin)
        draft = tl.load(drafts + slot * NUM + token - begin - 1, mask=guessed, other=0)
        name = tl.where(guessed, tl.maximum(draft, 0), name)  # a drafter's logits may have been invalid
    tl.store(word(words, slot, OUTSIDE), 1, mask=(slot < max_slots) & ((name < 0) | (name >= num_embeddings)))
    tl.store(token_ids + token, tl.minimum(tl.maximum(name, 0), num_embeddings - 1).to(tl.int64), mask=room)
    index = computed + token - begin
    within = here & (index >= 0) & (index < max_blocks * block_size)
    if drafts is not None:  # behind an answer's last place its row may have blocks of others
        within &= (fed == 0) | (index < tl.load(word(words, slot, LAST_PLACE), mask=fed, other=0))
    for group in tl.static_range(GROUPS):
        line = slot.to(tl.int64) + group * (max_slots + 1)
        block = tl.load(block_tables + line * max_blocks + index // block_size, mask=within, other=-1).to(tl.int64)
        mapping = tl.where(within & (block >= 0), block * block_size + index % block_size, -1)
        tl.store(slot_mapping + group * max_tokens + token, mapping, mask=room)
    moved = index + tl.load(word(words, slot, POSITION_DELTA), mask=here, other=0)
    if AXES > 1:
        prompt_end = tl.load(word(words, slot, PROMPT_LEN), mask=here, other=0)
        at = tl.load(staged + POSITIONS_AT)
        has = (at > 0) & (at <= capacity - AXES * planned)
        given = here & (index < prompt_end * has.to(tl.int32))
        moved = tl.where(index < prompt_end, index, moved)
        for axis in tl.static_range(AXES):
            position = tl.load(staged + at + axis * planned + token, mask=given, other=0)
            position = tl.where(given, position, moved)
            position = tl.where(here, tl.maximum(position, 0), 0)
            tl.store(positions + axis * max_tokens + token, position.to(tl.int64), mask=room)
    else:
        tl.store(positions + token, tl.where(here, tl.maximum(moved, 0), 0).to(tl.int64), mask=room)
    if last_keys is not None:
        at = tl.load(staged + POSITIONS_AT)
        has = (at > 0) & (at <= capacity - planned)
        given = here & (token < planned * has.to(tl.int32))
        if drafts is not None:
            given &= fed == 0
        last, longest = tl.load(staged + at + token, mask=given, other=0), max_blocks * block_size
        last = tl.where(given, tl.minimum(tl.maximum(last, -longest), longest - 1), tl.maximum(index, 0))
        tl.store(last_keys + token, tl.where(here, last, 0), mask=room)
    if adapters is not None:
        tl.store(adapters + token, tl.load(word(words, slot, ADAPTER), mask=here, other=0), mask=room)


@triton.jit
def inputs_kernel(
    token_ids, positions, slot_mapping, query_start, context_len, row_slot,
    sample_index, sample_row, sample_slot, sample_place, num_rows, num_sampled, home, last_keys, adapters,
    row_drafts,  # up to here: StepInputs
    words, block_tables,  # fields of SlotTensors
    drafts,  # the same; None: a row yields one token
    staged,  # [capacity]
    turn,  # [1]
    num_records, capacity, max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings, max_lines,
    NUM: tl.constexpr,  # most drafts of a slot
    GROUPS: tl.constexpr,
    AXES: tl.constexpr,  # rows of positions
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program 0 writes per-row data and the number of the next record; each other program writes BLOCK tokens."""
    grid_wait(OVERLAP)
    program = tl.program_id(0)
    if program == 0:
        mine = tl.minimum(tl.maximum(tl.load(turn), 0), num_records - 1)
        tl.store(turn, tl.where(mine + 1 < num_records, mine + 1, 0))
        fill_rows(
            query_start, context_len, row_slot, sample_index, sample_row, sample_slot, sample_place, num_rows,
            num_sampled, home, row_drafts, words, staged, max_rows, max_tokens, max_slots, max_blocks * block_size,
            max_lines, ROWS, NUM + 2 if NUM else 1,
        )  # fmt: skip
    else:
        fill_tokens(
            token_ids, positions, slot_mapping, last_keys, adapters, words, block_tables, drafts, staged, capacity,
            (program - 1) * BLOCK, max_rows, max_tokens, max_slots, max_blocks, block_size, num_embeddings, NUM,
            GROUPS, AXES, STEPS, BLOCK,
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
    """Update `slots` and rewrite all of `out` from the next record, then advance to the record after it.

    max_rows and max_tokens are the limits of the record's plan and of `out`; num_embeddings is the number of valid
    token ids. Capturable: the record's lengths are read on the device.
    """
    pinned, least = records.pinned, tail_at(max_rows, max_tokens)
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
    """Launch the two Triton kernels; arguments as `step_inputs`."""
    num_groups, lines, max_blocks = slots.block_tables.shape
    count, capacity = records.pinned.shape
    axes = out.axes
    take_record(slots, records, max_rows, max_tokens, axes if axes > 1 else int(out.last_keys is not None))
    if out.row_drafts is not None:
        launch_deal_drafts(slots, records.staged, max_rows, max_tokens)
    rows = triton.next_power_of_2(max_rows + 1)
    inputs_kernel[(1 + triton.cdiv(max_tokens, TOKENS),)](
        out.token_ids, out.positions, out.slot_mapping, out.query_start, out.context_len, out.row_slot,
        out.sample_index, out.sample_row, out.sample_slot, out.sample_place, out.num_rows, out.num_sampled,
        out.home, out.last_keys, out.adapters, out.row_drafts, slots.words, slots.block_tables,
        None if out.row_drafts is None else slots.drafts, records.staged, records.turn, count, capacity, max_rows,
        max_tokens, lines - 1, max_blocks, block_size, num_embeddings, len(out.sample_row),
        NUM=slots.drafts.shape[1], GROUPS=num_groups, AXES=axes, ROWS=rows, STEPS=max_rows.bit_length(), BLOCK=TOKENS,
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
    take_record_reference(slots, record, tail_at(max_rows, max_tokens))
    dummy, max_blocks = slots.block_tables.shape[1] - 1, slots.block_tables.shape[2]
    rows = min(max(int(record[Header.NUM_ROWS]), 0), max_rows)
    tokens = min(max(int(record[Header.NUM_TOKENS]), 0), max_tokens) if rows else 0
    column = {one: record[column_at(one, max_rows) :].long() for one in RowColumn}
    slot = column[RowColumn.SLOT][:rows]
    slot = torch.where((slot >= 0) & (slot < dummy), slot, dummy)
    start = column[RowColumn.START][: rows + 1].clamp(0, tokens)
    length, computed = column[RowColumn.LEN][:rows], column[RowColumn.COMPUTED][:rows]
    flags = column[RowColumn.FLAGS][:rows]
    fed, planned, drafts = (flags & RowFlag.FEED) != 0, tokens, torch.zeros_like(length)
    if out.row_drafts is not None:
        _deal(slots, slot, flags, length, computed, tokens)
        length, computed, drafts = resolve_reference(slots, slot, flags, length, computed, max_tokens)
        start = torch.cat([length.new_zeros(1), length.cumsum(0)]).clamp(0, tokens)
        tokens = min(int(length.sum()), tokens)
    fill(out.query_start, start, tokens)
    fill(out.context_len, (computed + length).clamp(0, max_blocks * block_size), 0)
    fill(out.row_slot, slot, dummy)
    sampled = (flags & RowFlag.SAMPLE) != 0
    last = start[:-1] + length - 1, computed + length - slots.word(SlotWord.PROMPT_LEN)[slot]
    number = slots.drafts.shape[1]
    fill_lines_reference(out, sampled, drafts, slot, *last, dummy, max_tokens, number + 2 if number else 1)
    out.num_rows.fill_(rows)
    out.home.fill_(record[Header.HOME])

    token = torch.arange(tokens, device=record.device)
    row = (torch.searchsorted(start[:-1].contiguous(), token, right=True) - 1).clamp(min=0)
    slot = slot[row]
    index = computed[row] + token - start[row]
    given = record[tokens_at(max_rows) :][:tokens].long()
    fed, behind = fed[row], token - start[row]
    name = torch.where(fed & (behind == 0), slots.word(SlotWord.LAST_TOKEN)[slot].long(), given)
    if out.row_drafts is not None and slots.drafts.shape[1]:
        guess = slots.drafts[slot, (behind - 1).clamp(0, slots.drafts.shape[1] - 1)].clamp(min=0).long()
        name = torch.where(fed & (behind > 0), guess, name)
    slots.word(SlotWord.OUTSIDE)[slot[(slot < dummy) & ((name < 0) | (name >= num_embeddings))]] = 1
    fill(out.token_ids, name.clamp(0, num_embeddings - 1), 0)
    within = (index >= 0) & (index < max_blocks * block_size)
    if out.row_drafts is not None:
        within &= ~fed | (index < slots.word(SlotWord.LAST_PLACE)[slot])
    for table, mapping in zip(slots.block_tables, out.slot_mapping):
        block = table[slot, (index // block_size).clamp(0, max_blocks - 1)].long()
        fill(mapping, torch.where(within & (block >= 0), block * block_size + index % block_size, -1), -1)
    _fill_positions(out, slots, record, slot, index, fed, planned, max_blocks * block_size)


def _deal(slots: SlotTensors, slot: Tensor, flags: Tensor, length: Tensor, computed: Tensor, tokens: int) -> None:
    """Deals the step's places for drafts out among rows int64 [rows]; tokens: of the step."""
    fed = (flags & RowFlag.FEED) != 0
    _, _, drafts = resolve_reference(slots, slot, flags, length, computed, tokens)
    drafted = (fed & (length > 1)).nonzero().flatten()
    places = max(tokens - int(torch.where(fed, 1, length).sum()), 0)
    shares = deal_drafts_reference(slots, slot[drafted], drafts[drafted], places)
    slots.word(SlotWord.NUM_DRAFTS)[slot[drafted]] = shares.int()


def _fill_positions(
    out: StepInputs,
    slots: SlotTensors,
    record: Tensor,
    slot: Tensor,
    index: Tensor,
    fed: Tensor,
    planned: int,
    longest: int,
) -> None:
    """Fill what a token's place decides; by token: its slot, its place, whether its row is fed."""
    tokens, prompt_len = len(index), slots.word(SlotWord.PROMPT_LEN)
    position = index + slots.word(SlotWord.POSITION_DELTA)[slot]
    if (axes := out.axes) > 1:
        at = int(record[Header.POSITIONS_AT])
        has = 0 < at <= record.numel() - axes * planned
        given = record[at : at + axes * planned].view(axes, planned)[:, :tokens] if has else index.expand(axes, tokens)
        prompt = given.long()
        position = torch.where(index < prompt_len[slot], prompt, position)
    if out.last_keys is not None:
        keys = _last_keys(record, index, longest, planned)
        fill(out.last_keys, keys if out.row_drafts is None else torch.where(fed, index.clamp(min=0), keys), 0)
    if out.adapters is not None:
        fill(out.adapters, slots.word(SlotWord.ADAPTER)[slot], 0)
    out.positions.zero_()
    out.positions[..., :tokens] = position.clamp(min=0)


def _last_keys(record: Tensor, index: Tensor, longest: int, planned: int) -> Tensor:
    """Return the record's last key of each token; without such data each token attends up to itself."""
    at, tokens = int(record[Header.POSITIONS_AT]), len(index)
    given = 0 < at <= record.numel() - planned
    return record[at : at + tokens].clamp(-longest, longest - 1) if given else index.clamp(min=0)
