"""Places of a step's drafts in the step's tokens and in the drafter's cache, and the drafts that are written there.

A row of a step with d drafts has 1 + d tokens, from its newest token on. Pass j of a drafter (j = 0 .. d - 1) computes
the row's token j and guesses token j + 1. Rows with drafts are numbered in the order of the step; the other numbers are
padding, which reads the dummy line of the block tables and writes nothing.

    step    | a | b | c c c | d d d |       passes over (c, d):   0: c0, d0 -> c1, d1     1: c1, d1 -> c2, d2

Users: engine/step/parts/drafter. Thread: the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from _fast.layout import SlotWord, TokenCode
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.precompile import new_indices
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

PROMPT_LEN = tl.constexpr(int(SlotWord.PROMPT_LEN))
NO_DRAFT = tl.constexpr(int(TokenCode.END))
NO_CONTEXT = tl.constexpr(2)  # tokens of a padding row, of which the drafter's attention sees the last


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlaces:
    """Passes of a drafter over B rows; written by `draft_places`."""

    token: Tensor  # [passes, B] int64: the computed token in the step
    mapping: Tensor  # [passes, B] int64: its place in the drafter's cache; -1: nothing is stored
    context: Tensor  # [passes, B] int32: tokens up to it
    run: Tensor  # [passes, B] int32: place of the guess among runs of `width` per row; -1: no guess
    place: Tensor  # [passes, B] int32: number of the guess in the answer
    line: Tensor  # [B] int32: the row's line of the block tables
    slot: Tensor  # [B] int32


def empty_places(passes: int, rows: int, device: str | torch.device) -> DraftPlaces:
    """Allocate the places of so many passes over so many rows."""

    def made(dtype: torch.dtype) -> Tensor:
        return new_indices(passes, rows, dtype=dtype, device=device)

    line, slot = (new_indices(rows, dtype=torch.int32, device=device) for _ in range(2))
    short = torch.int32
    return DraftPlaces(made(torch.int64), made(torch.int64), made(short), made(short), made(short), line, slot)


@triton.jit
def draft_places_kernel(
    token,  # [PASSES, rows] int64, as the next
    mapping,
    context,  # [PASSES, rows] int32, as the next two
    run,
    place,
    line,  # [rows] int32, as the next
    slot,
    words,  # [slots, SLOT_WORDS] int32
    row_drafts,  # [max_rows] int32, as the next two
    row_slot,
    context_len,
    query_start,  # [max_rows + 1] int32
    lines,  # [max_rows] int32
    slot_mapping,  # [num_tokens] int64
    rows,
    max_rows,
    max_slots,
    PASSES: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= rows and max_rows
):
    """A single program, with a lane per row."""
    lane = tl.arange(0, ROWS)
    empty, none = lane < rows, tl.zeros([ROWS], tl.int32)
    tl.store(line + lane, none + max_slots, mask=empty)
    tl.store(slot + lane, none + max_slots, mask=empty)
    for j in tl.static_range(PASSES):
        at = j * rows + lane
        tl.store(token + at, none.to(tl.int64), mask=empty)
        tl.store(mapping + at, none.to(tl.int64) - 1, mask=empty)
        tl.store(context + at, none + NO_CONTEXT, mask=empty)
        tl.store(run + at, none - 1, mask=empty)
        tl.store(place + at, none, mask=empty)
    tl.debug_barrier()
    drafts = tl.load(row_drafts + lane, mask=lane < max_rows, other=0)
    number = tl.cumsum((drafts > 0).to(tl.int32), 0) - 1
    here = (drafts > 0) & (number < rows)
    own = tl.load(row_slot + lane, mask=here, other=0)
    begin = tl.load(query_start + lane, mask=here, other=0)
    known = tl.load(context_len + lane, mask=here, other=0) - drafts
    answered = known - tl.load(word(words, own, PROMPT_LEN), mask=here, other=0)
    tl.store(line + number, tl.load(lines + lane, mask=here, other=0), mask=here)
    tl.store(slot + number, own, mask=here)
    for j in tl.static_range(PASSES):
        at, inside = j * rows + number, here & (j < drafts)
        tl.store(token + at, (begin + j).to(tl.int64), mask=inside)
        tl.store(mapping + at, tl.load(slot_mapping + begin + j, mask=inside, other=-1), mask=inside)
        tl.store(context + at, known + j, mask=inside)
        tl.store(run + at, number * (PASSES + 2) + j, mask=inside)
        tl.store(place + at, answered + j, mask=inside)


def draft_places(out: DraftPlaces, step: DraftedRows, slot_mapping: Tensor) -> None:
    """Fill `out` for a step's rows; slot_mapping int64 [T]: places of the step's tokens in the drafter's group of the
    cache."""
    run = launch_draft_places if step.drafts.is_cuda else draft_places_reference
    run(out, step, slot_mapping)


def launch_draft_places(out: DraftPlaces, step: DraftedRows, slot_mapping: Tensor) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    passes, rows = out.token.shape
    words, max_rows = step.state.words, len(step.drafts)
    assert step.lines is not None
    draft_places_kernel[(1,)](
        out.token, out.mapping, out.context, out.run, out.place, out.line, out.slot, words, step.drafts, step.slots,
        step.context_len, step.query_start, step.lines, slot_mapping, rows, max_rows, len(words) - 1, PASSES=passes,
        ROWS=triton.next_power_of_2(max(rows, max_rows)), num_warps=4,
    )  # fmt: skip


def draft_places_reference(out: DraftPlaces, step: DraftedRows, slot_mapping: Tensor) -> None:
    (passes, rows), dummy = out.token.shape, len(step.state.words) - 1
    for tensor, value in ((out.token, 0), (out.mapping, -1), (out.context, 2), (out.run, -1), (out.place, 0)):
        tensor.fill_(value)
    out.line.fill_(dummy)
    out.slot.fill_(dummy)
    drafted = (step.drafts > 0).nonzero().flatten()[:rows]
    drafts, own, begin = step.drafts[drafted], step.slots[drafted], step.query_start[drafted].long()
    known = step.context_len[drafted] - drafts
    number = torch.arange(len(drafted), device=drafted.device)
    out.slot[: len(own)] = own
    out.line[: len(own)] = drafted.int() if step.lines is None else step.lines[drafted]
    for j in range(passes):
        some = (drafts > j).nonzero().flatten()
        out.token[j, some] = begin[some] + j
        out.mapping[j, some] = slot_mapping[begin[some] + j]
        out.context[j, some] = known[some] + j
        out.run[j, some] = (number[some] * (passes + 2) + j).int()
        out.place[j, some] = known[some] + j - step.state.word(SlotWord.PROMPT_LEN)[own[some].long()]


@triton.jit
def put_drafts_kernel(
    token_ids,  # [num_tokens] int64
    drafts,  # [slots, NUM] int32
    guesses,  # [rows * (NUM + 2)] int32
    token,  # [queries] int64
    run,  # [queries] int32, as the next
    slot,
    num_tokens,
    AHEAD: tl.constexpr,
    NUM: tl.constexpr,
):
    """A program per query."""
    query = tl.program_id(0)
    at = tl.load(run + query)
    after = tl.load(token + query) + AHEAD
    if at >= 0:
        guess = tl.load(guesses + at)
        tl.store(drafts + tl.load(slot + query) * NUM + at % (NUM + 2), tl.where(guess < 0, NO_DRAFT, guess))
        tl.store(token_ids + after, tl.maximum(guess, 0).to(tl.int64), mask=after < num_tokens)


class Queries(NamedTuple):
    """Queries of a drafter and the drafts that they guess."""

    token: Tensor  # [N] int64: the query's token in the step
    run: Tensor  # [N] int32: place of the guess among runs of `width` per row; -1: no guess
    slot: Tensor  # [N] int32
    ahead: int  # how far behind the query's token the guessed token lies


def put_drafts(slots: SlotTensors, token_ids: Tensor, guesses: Tensor, queries: Queries) -> None:
    """Write the guesses, int32 [B * width] at queries.run, to the slots and to the step's tokens.

    A guess below 0 (the drafter's logits are invalid) becomes TokenCode.END, which no place chooses, and token 0.
    """
    run = launch_put_drafts if guesses.is_cuda else put_drafts_reference
    run(slots, token_ids, guesses, queries)


def launch_put_drafts(slots: SlotTensors, token_ids: Tensor, guesses: Tensor, queries: Queries) -> None:
    put_drafts_kernel[(len(queries.token),)](
        token_ids, slots.drafts, guesses, queries.token, queries.run, queries.slot, len(token_ids),
        AHEAD=queries.ahead, NUM=slots.drafts.shape[1], num_warps=1,
    )  # fmt: skip


def put_drafts_reference(slots: SlotTensors, token_ids: Tensor, guesses: Tensor, queries: Queries) -> None:
    some = (queries.run >= 0).nonzero().flatten()
    run = queries.run[some].long()
    guess, place = guesses[run].int(), run % (slots.drafts.shape[1] + 2)
    slots.drafts[queries.slot[some].long(), place] = torch.where(guess < 0, int(TokenCode.END), guess)
    token_ids[queries.token[some] + queries.ahead] = guess.clamp(min=0).long()
