"""Queries of a drafter that guesses all drafts of a row in one pass: the row's newest token, then masks.

A row of a step with d drafts has 1 + d tokens, from its newest token on. The drafter's queries lie at the places of
these tokens. If one is skipped, query j guesses the token of its own place, and the first guesses nothing (DFlash):
1 + d queries. If none is, query j guesses the token behind its place (DSpark, P-EAGLE): d queries. The queries of all
rows with drafts are adjacent; behind them is padding, which reads slot `max_slots` and writes nothing.

    step     | a | b | c0 c1 c2 | d0 d1 |       skipped 1:  c0 m m d0 m -> c1 c2, d1    skipped 0:  c0 m d0 -> c1 c2, d1

Users: engine/step/parts/drafter_blocks. Thread: the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.precompile import new_indices
from engine.kernels.step_tensors import word
from engine.kernels.target import tl, triton

PROMPT_LEN = tl.constexpr(int(SlotWord.PROMPT_LEN))


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlaces:
    """N queries of B rows; written by `block_places`."""

    token: Tensor  # [N] int64: the query's token in the step
    ids: Tensor  # [N] int64: the newest token's id, or the mask's
    mapping: Tensor  # [N] int64: its place in the drafter's cache; -1: nothing is stored
    run: Tensor  # [N] int32: place of the guess among runs of `width` per row; -1: no guess
    place: Tensor  # [N] int32: number of the guess in the answer
    slot: Tensor  # [N] int32
    before: Tensor  # [N] int32: queries of the same row before it
    query_start: Tensor  # [B + 1] int32
    context: Tensor  # [B] int32: tokens up to the row's last query
    line: Tensor  # [B] int32: the row's line of the block tables


def empty_block(rows: int, queries: int, device: str | torch.device) -> BlockPlaces:
    """Allocate the places of so many rows and queries."""

    def made(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return new_indices(count, dtype=dtype, device=device)

    token, ids, mapping = (made(queries, torch.int64) for _ in range(3))
    run, place, slot, before = (made(queries) for _ in range(4))
    return BlockPlaces(token, ids, mapping, run, place, slot, before, made(rows + 1), made(rows), made(rows))


@triton.jit
def block_places_kernel(
    token,  # [queries] int64, as the next two
    ids,
    mapping,
    run,  # [queries] int32, as the next three
    place,
    slot,
    before,
    starts,  # [rows + 1] int32
    context,  # [rows] int32, as the next
    line,
    words,  # [slots, SLOT_WORDS] int32
    row_drafts,  # [max_rows] int32, as the next two
    row_slot,
    context_len,
    query_start,  # [max_rows + 1] int32
    lines,  # [max_rows] int32
    slot_mapping,  # [num_tokens] int64
    token_ids,  # [num_tokens] int64
    mask_id,
    rows,
    queries,
    max_rows,
    max_slots,
    SKIPPED: tl.constexpr,
    WIDTH: tl.constexpr,  # of a run
    ROWS: tl.constexpr,  # power of two > rows and >= max_rows
):
    """A single program, with a lane per row."""
    lane = tl.arange(0, ROWS)
    none = tl.zeros([ROWS], tl.int32)
    for first in range(0, queries, ROWS):
        at = first + lane
        inside = at < queries
        tl.store(token + at, none.to(tl.int64), mask=inside)
        tl.store(ids + at, none.to(tl.int64), mask=inside)
        tl.store(mapping + at, none.to(tl.int64) - 1, mask=inside)
        tl.store(run + at, none - 1, mask=inside)
        tl.store(place + at, none, mask=inside)
        tl.store(slot + at, none + max_slots, mask=inside)
        tl.store(before + at, none, mask=inside)
    drafts = tl.load(row_drafts + lane, mask=lane < max_rows, other=0)
    number = tl.cumsum((drafts > 0).to(tl.int32), 0) - 1
    here = (drafts > 0) & (number < rows)
    count = tl.where(here, drafts + SKIPPED, 0)
    end = tl.cumsum(count, 0)
    tl.store(starts + lane, none + tl.sum(count, 0), mask=lane <= rows)
    tl.store(context + lane, none, mask=lane < rows)
    tl.store(line + lane, none + max_slots, mask=lane < rows)
    tl.debug_barrier()
    own = tl.load(row_slot + lane, mask=here, other=0)
    begin = tl.load(query_start + lane, mask=here, other=0)
    known = tl.load(context_len + lane, mask=here, other=0) - drafts
    answered = known - tl.load(word(words, own, PROMPT_LEN), mask=here, other=0)
    tl.store(starts + number, end - count, mask=here)
    tl.store(context + number, known + count - 1, mask=here)
    tl.store(line + number, tl.load(lines + lane, mask=here, other=0), mask=here)
    for j in range(tl.max(count, 0)):
        at = end - count + j
        inside = (j < count) & (at < queries)
        newest = tl.load(token_ids + begin, mask=inside, other=0)
        tl.store(token + at, (begin + j).to(tl.int64), mask=inside)
        tl.store(ids + at, tl.where(none + j == 0, newest, mask_id), mask=inside)
        tl.store(mapping + at, tl.load(slot_mapping + begin + j, mask=inside, other=-1), mask=inside)
        tl.store(slot + at, own, mask=inside)
        tl.store(before + at, none + j, mask=inside)
        guesses = inside & (none + j >= SKIPPED)
        tl.store(run + at, number * WIDTH + j - SKIPPED, mask=guesses)
        tl.store(place + at, answered + j - SKIPPED, mask=guesses)


def block_places(
    out: BlockPlaces, step: DraftedRows, token_ids: Tensor, slot_mapping: Tensor, mask_id: int, skipped: int
) -> None:
    """Fill `out` for a step's rows; token_ids, slot_mapping int64 [T]: the step's tokens, and their places in the
    drafter's group of the cache."""
    run = launch_block_places if step.drafts.is_cuda else block_places_reference
    run(out, step, token_ids, slot_mapping, mask_id, skipped)


def launch_block_places(
    out: BlockPlaces, step: DraftedRows, token_ids: Tensor, slot_mapping: Tensor, mask_id: int, skipped: int
) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    rows, words, max_rows = len(out.context), step.state.words, len(step.drafts)
    assert step.lines is not None
    block_places_kernel[(1,)](
        out.token, out.ids, out.mapping, out.run, out.place, out.slot, out.before, out.query_start, out.context,
        out.line, words, step.drafts, step.slots, step.context_len, step.query_start, step.lines, slot_mapping,
        token_ids, mask_id, rows, len(out.token), max_rows, len(words) - 1, SKIPPED=skipped,
        WIDTH=step.state.drafts.shape[1] + 2, ROWS=triton.next_power_of_2(max(rows + 1, max_rows)), num_warps=4,
    )  # fmt: skip


def block_places_reference(
    out: BlockPlaces, step: DraftedRows, token_ids: Tensor, slot_mapping: Tensor, mask_id: int, skipped: int
) -> None:
    rows, dummy, width = len(out.context), len(step.state.words) - 1, step.state.drafts.shape[1] + 2
    for tensor in (out.token, out.ids, out.place, out.before):
        tensor.zero_()
    for tensor in (out.mapping, out.run):
        tensor.fill_(-1)
    out.slot.fill_(dummy)
    out.context.fill_(0)
    out.line.fill_(dummy)
    drafted = (step.drafts > 0).nonzero().flatten()[:rows]
    drafts, own, begin = step.drafts[drafted], step.slots[drafted], step.query_start[drafted].long()
    known, count = step.context_len[drafted] - drafts, drafts.long() + skipped
    end = count.cumsum(0)
    out.query_start.fill_(int(count.sum()))
    out.query_start[: len(end)] = (end - count).int()
    out.context[: len(end)] = (known + count - 1).int()
    out.line[: len(end)] = drafted.int() if step.lines is None else step.lines[drafted]
    number = torch.arange(len(end), device=end.device).repeat_interleave(count)[: len(out.token)]
    query = torch.arange(len(number), device=end.device)
    j = query - (end - count)[number]
    out.token[query] = token = begin[number] + j
    out.ids[query] = torch.where(j == 0, token_ids[token], mask_id)
    out.mapping[query] = slot_mapping[token]
    out.slot[query] = own[number]
    out.before[query] = j.int()
    guesses = (j >= skipped).nonzero().flatten()
    row, ahead = number[guesses], j[guesses] - skipped
    out.run[guesses] = (row * width + ahead).int()
    answered = known - step.state.word(SlotWord.PROMPT_LEN)[own.long()]
    out.place[guesses] = (answered[row] + ahead).int()
