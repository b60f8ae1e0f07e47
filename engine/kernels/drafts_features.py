"""Features of a target's tokens for the drafter: those of a step's tokens, and the one before a row's first token.

A drafter's entry for a token reads the feature of the token before. Within a step this is the feature of the row's
previous token. For the row's first token it is held by the slot, or by the block before: the feature of a block's last
token lies with the block, so a row that begins behind cached blocks finds it.

    before[t] = feature[t - 1];  of a row's first token at place p: p % block_size == 0 ? of_blocks[block of p - 1]
                                                                                        : of_slots[slot]
Users: engine/step/parts/drafter. Thread: the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.step_tensors import word
from engine.kernels.target import tl, triton

NUM_DRAFTS = tl.constexpr(int(SlotWord.NUM_DRAFTS))
BLOCK = 1024  # numbers of a feature that a program moves at once


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Features that outlive a step; H numbers each."""

    of_slots: Tensor  # [max_slots + 1, H]: of the token before the slot's newest
    of_blocks: Tensor  # [num_blocks, H]: of each block's last token
    block_size: int


@triton.jit
def row_of(query_start, token, num_rows, STEPS: tl.constexpr):
    """Return the last row that begins at or before the token; rows without tokens at the end do not count."""
    row = token * 0
    for step in tl.static_range(STEPS):
        next_row = row + (1 << (STEPS - 1 - step))
        begin = tl.load(query_start + next_row, mask=next_row < num_rows, other=0x7FFFFFFF)
        row = tl.where(begin <= token, next_row, row)
    return row


@triton.jit
def features_before_kernel(
    before,  # [num_tokens, width]
    features,  # [num_tokens, width]
    of_slots,  # [slots, width]
    of_blocks,  # [num_blocks, width]
    row_slot,  # [num_rows] int32
    query_start,  # [num_rows + 1] int32
    context_len,  # [num_rows] int32
    tables,  # [lines, max_blocks] int32
    lines,  # [num_rows] int32
    width,
    num_rows,
    max_blocks,
    block_size,
    STEPS: tl.constexpr,  # 2 ** STEPS > num_rows
    BLOCK: tl.constexpr,
):
    """A program per token."""
    token = tl.program_id(0)
    if token < tl.load(query_start + num_rows):
        row = row_of(query_start, token, num_rows, STEPS)
        begin = tl.load(query_start + row)
        source = features + (token - 1).to(tl.int64) * width
        if token == begin:
            place = tl.load(context_len + row) - (tl.load(query_start + row + 1) - begin)
            source = of_slots + tl.load(row_slot + row).to(tl.int64) * width
            if (place > 0) & (place % block_size == 0):
                entry = tl.load(lines + row).to(tl.int64) * max_blocks + place // block_size - 1
                source = of_blocks + tl.load(tables + entry).to(tl.int64) * width
        for first in range(0, width, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            tl.store(before + token.to(tl.int64) * width + lane, tl.load(source + lane, mask=lane < width),
                     mask=lane < width)  # fmt: skip


@triton.jit
def keep_features_kernel(
    of_slots,  # [slots, width]
    of_blocks,  # [num_blocks, width]
    features,  # [num_tokens, width]
    row_slot,  # [num_rows] int32
    query_start,  # [num_rows + 1] int32
    slot_mapping,  # [num_tokens] int64
    width,
    num_rows,
    block_size,
    STEPS: tl.constexpr,  # 2 ** STEPS > num_rows
    BLOCK: tl.constexpr,
):
    """A program per token: the last token of a row, and of a block, is stored."""
    token = tl.program_id(0)
    if token < tl.load(query_start + num_rows):
        row = row_of(query_start, token, num_rows, STEPS)
        is_last = token == tl.load(query_start + row + 1) - 1
        place = tl.load(slot_mapping + token)
        ends = (place >= 0) & (place % block_size == block_size - 1)
        slot = tl.load(row_slot + row).to(tl.int64)
        if ends | is_last:
            for first in range(0, width, BLOCK):
                lane = first + tl.arange(0, BLOCK)
                value = tl.load(features + token.to(tl.int64) * width + lane, mask=lane < width)
                if is_last:
                    tl.store(of_slots + slot * width + lane, value, mask=lane < width)
                if ends:
                    tl.store(of_blocks + place // block_size * width + lane, value, mask=lane < width)


def features_before(features: Tensor, held: Features, rows: DraftedRows, tables: Tensor) -> Tensor:
    """Return the feature before each of the step's tokens, like features [T, H]; see above. Tokens without a row get
    any.

    tables int32 [lines, max_blocks]: block tables of the drafter's group.
    """
    run = launch_features_before if features.is_cuda else features_before_reference
    return run(features, held, rows, tables)


def launch_features_before(features: Tensor, held: Features, rows: DraftedRows, tables: Tensor) -> Tensor:
    """Launch the kernel on a grid that depends only on shapes, as the launchers below."""
    before = torch.empty_like(features)
    assert rows.lines is not None
    features_before_kernel[(len(features),)](
        before, features, held.of_slots, held.of_blocks, rows.slots, rows.query_start, rows.context_len, tables,
        rows.lines, features.shape[1], len(rows.slots), tables.shape[1], held.block_size,
        STEPS=len(rows.slots).bit_length(), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return before


def features_before_reference(features: Tensor, held: Features, rows: DraftedRows, tables: Tensor) -> Tensor:
    before = features.roll(1, 0)
    begin, end = rows.query_start[:-1].long(), rows.query_start[1:].long()
    row = (end > begin).nonzero().flatten()
    first = begin[row]
    place = rows.context_len[row].long() - (end - begin)[row]
    line = row if rows.lines is None else rows.lines[row].long()
    behind = (place > 0) & (place % held.block_size == 0)
    block = tables[line, (place // held.block_size - 1).clamp(min=0)].long()
    slot = rows.slots[row].long()
    before[first] = torch.where(behind[:, None], held.of_blocks[block * behind], held.of_slots[slot])
    return before


def keep_features(features: Tensor, held: Features, rows: DraftedRows, slot_mapping: Tensor) -> None:
    """Store the feature of each row's last token for its slot, and of each block's last token.

    slot_mapping int64 [T]: places in the cache, negative: none.
    """
    run = launch_keep_features if features.is_cuda else keep_features_reference
    run(features, held, rows, slot_mapping)


def launch_keep_features(features: Tensor, held: Features, rows: DraftedRows, slot_mapping: Tensor) -> None:
    keep_features_kernel[(len(features),)](
        held.of_slots, held.of_blocks, features, rows.slots, rows.query_start, slot_mapping, features.shape[1],
        len(rows.slots), held.block_size, STEPS=len(rows.slots).bit_length(), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def keep_features_reference(features: Tensor, held: Features, rows: DraftedRows, slot_mapping: Tensor) -> None:
    begin, end = rows.query_start[:-1].long(), rows.query_start[1:].long()
    row = (end > begin).nonzero().flatten()
    held.of_slots[rows.slots[row].long()] = features[end[row] - 1]
    place = slot_mapping[: int(end[-1])]
    last = ((place >= 0) & (place % held.block_size == held.block_size - 1)).nonzero().flatten()
    held.of_blocks[place[last] // held.block_size] = features[last]


@triton.jit
def accept_features_kernel(
    of_slots,  # [slots, width], or None: the drafter has no features
    words,  # [slots, SLOT_WORDS] int32
    features,  # [num_tokens, width], or None
    runs,  # [max_rows, WIDTH] int32
    row_slot,  # [max_rows] int32
    row_drafts,  # [max_rows] int32
    query_start,  # [max_rows + 1] int32
    width,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= WIDTH
    BLOCK: tl.constexpr,
):
    """A program per row."""
    row = tl.program_id(0)
    drafts = tl.load(row_drafts + row)
    lane = tl.arange(0, LANES)
    count = tl.sum((tl.load(runs + row * WIDTH + lane, mask=lane < WIDTH, other=-1) >= 0).to(tl.int32), 0)
    if (drafts >= 0) & (count > 0):
        slot = tl.load(row_slot + row)
        tl.store(word(words, slot, NUM_DRAFTS), DRAFTS)
        if features is not None:
            source = features + (tl.load(query_start + row + 1) - 1 - drafts + count - 1).to(tl.int64) * width
            for first in range(0, width, BLOCK):
                at = first + tl.arange(0, BLOCK)
                value = tl.load(source + at, mask=at < width)
                tl.store(of_slots + slot.to(tl.int64) * width + at, value, mask=at < width)


def accept_drafts(rows: DraftedRows, runs: Tensor) -> None:
    """After the choice: store SlotWord.NUM_DRAFTS of each sampled row; runs int32 [R, width]: tokens, then negative
    numbers."""
    if runs.is_cuda:
        launch_accept(None, rows, None, runs)
    else:
        accept_reference(rows, runs)


def accept_reference(rows: DraftedRows, runs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sampled rows and the counts of their tokens, too."""
    count = (runs >= 0).sum(1)
    row = ((rows.drafts >= 0) & (count > 0)).nonzero().flatten()
    rows.state.word(SlotWord.NUM_DRAFTS)[rows.slots[row].long()] = rows.state.drafts.shape[1]
    return row, count[row]


def accept_features(held: Features, rows: DraftedRows, features: Tensor, runs: Tensor) -> None:
    """As `accept_drafts`; store the feature of the token before each sampled row's newest, too."""
    if features.is_cuda:
        launch_accept(held.of_slots, rows, features, runs)
    else:
        accept_features_reference(held, rows, features, runs)


def launch_accept(of_slots: Tensor | None, rows: DraftedRows, features: Tensor | None, runs: Tensor) -> None:
    state, width = rows.state, runs.shape[1]
    accept_features_kernel[(len(runs),)](
        of_slots, state.words, features, runs, rows.slots, rows.drafts, rows.query_start,
        0 if features is None else features.shape[1],
        DRAFTS=state.drafts.shape[1], WIDTH=width, LANES=triton.next_power_of_2(width), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def accept_features_reference(held: Features, rows: DraftedRows, features: Tensor, runs: Tensor) -> None:
    row, count = accept_reference(rows, runs)
    last = rows.query_start[1:][row].long() - 1 - rows.drafts[row] + count - 1
    held.of_slots[rows.slots[row].long()] = features[last]
