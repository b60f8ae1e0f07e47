"""Places of a step's drafts in the step's tokens and in the drafter's cache, and the drafts that are written there.

A row of a step with d drafts has 1 + d tokens, from its newest token on. Pass j of a drafter (j = 0 .. d - 1) computes
the row's token j and guesses token j + 1. Rows with drafts are numbered in the order of the step; the other numbers are
padding, which reads the dummy line of the block tables and writes nothing. A pass has its places from the pass before,
so one recorded pass serves as the second, the third and so on.

    step    | a | b | c c c | d d |       passes over (c, d):   0: c0, d0 -> c1, d1     1: c1 -> c2, d has no more

Users: engine/step/parts/drafter. Thread: the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from _fast.layout import SlotWord, TokenCode
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

PROMPT_LEN = tl.constexpr(int(SlotWord.PROMPT_LEN))
NO_DRAFT = tl.constexpr(int(TokenCode.END))
NO_CONTEXT = tl.constexpr(2)  # tokens of a row without a guess, of which the drafter's attention sees the last
BLOCK = 256  # rows of a program


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlaces:
    """A pass of a drafter over B rows; written by `draft_places` for the first, by `next_places` for each further."""

    token: Tensor  # [B] int64: the computed token in the step
    mapping: Tensor  # [B] int64: its place in the drafter's cache; -1: nothing is stored
    context: Tensor  # [B] int32: tokens up to it
    run: Tensor  # [B] int32: place of the guess among runs of `width` per row; -1: no guess
    place: Tensor  # [B] int32: number of the guess in the answer
    left: Tensor  # [B] int32: guesses from this pass on
    line: Tensor  # [B] int32: the row's line of the block tables
    slot: Tensor  # [B] int32

    def first(self, rows: int) -> DraftPlaces:
        """The places of the first rows."""
        return DraftPlaces(*(getattr(self, field.name)[:rows] for field in fields(self)))


def empty_places(rows: int, device: str | torch.device) -> DraftPlaces:
    """Allocate the places of a pass over so many rows; zeros, because a walk through steps runs no kernel."""
    token, mapping = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
    return DraftPlaces(token, mapping, *(torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(6)))


@triton.jit
def draft_places_kernel(
    token,  # [rows] int64, as the next
    mapping,
    context,  # [rows] int32, as the next five
    run,
    place,
    left,
    line,
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
    WIDTH: tl.constexpr,  # of a run
    ROWS: tl.constexpr,  # power of two >= rows and max_rows
):
    """A single program, with a lane per row."""
    lane = tl.arange(0, ROWS)
    empty, none = lane < rows, tl.zeros([ROWS], tl.int32)
    tl.store(line + lane, none + max_slots, mask=empty)
    tl.store(slot + lane, none + max_slots, mask=empty)
    tl.store(token + lane, none.to(tl.int64), mask=empty)
    tl.store(mapping + lane, none.to(tl.int64) - 1, mask=empty)
    tl.store(context + lane, none + NO_CONTEXT, mask=empty)
    tl.store(run + lane, none - 1, mask=empty)
    tl.store(place + lane, none, mask=empty)
    tl.store(left + lane, none, mask=empty)
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
    tl.store(token + number, begin.to(tl.int64), mask=here)
    tl.store(mapping + number, tl.load(slot_mapping + begin, mask=here, other=-1), mask=here)
    tl.store(context + number, known, mask=here)
    tl.store(run + number, number * WIDTH, mask=here)
    tl.store(place + number, answered, mask=here)
    tl.store(left + number, drafts, mask=here)


def draft_places(out: DraftPlaces, step: DraftedRows, slot_mapping: Tensor) -> None:
    """Fill `out` for the first pass over a step's rows; slot_mapping int64 [T]: places of the step's tokens in the
    drafter's group of the cache."""
    run = launch_draft_places if step.drafts.is_cuda else draft_places_reference
    run(out, step, slot_mapping)


def launch_draft_places(out: DraftPlaces, step: DraftedRows, slot_mapping: Tensor) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    rows, words, max_rows = len(out.token), step.state.words, len(step.drafts)
    assert step.lines is not None
    draft_places_kernel[(1,)](
        out.token, out.mapping, out.context, out.run, out.place, out.left, out.line, out.slot, words, step.drafts,
        step.slots, step.context_len, step.query_start, step.lines, slot_mapping, rows, max_rows, len(words) - 1,
        WIDTH=step.state.drafts.shape[1] + 2, ROWS=triton.next_power_of_2(max(rows, max_rows)), num_warps=4,
    )  # fmt: skip


def draft_places_reference(out: DraftPlaces, step: DraftedRows, slot_mapping: Tensor) -> None:
    dummy, width = len(step.state.words) - 1, step.state.drafts.shape[1] + 2
    for tensor, value in ((out.mapping, -1), (out.context, 2), (out.run, -1), (out.line, dummy), (out.slot, dummy)):
        tensor.fill_(value)
    for tensor in (out.token, out.place, out.left):
        tensor.zero_()
    drafted = (step.drafts > 0).nonzero().flatten()[: len(out.token)]
    drafts, own, begin = step.drafts[drafted], step.slots[drafted], step.query_start[drafted].long()
    known, count = step.context_len[drafted] - drafts, len(drafted)
    out.slot[:count] = own
    out.line[:count] = drafted.int() if step.lines is None else step.lines[drafted]
    out.token[:count] = begin
    out.mapping[:count] = slot_mapping[begin]
    out.context[:count] = known
    out.run[:count] = torch.arange(count, dtype=torch.int32, device=begin.device) * width
    out.place[:count] = known - step.state.word(SlotWord.PROMPT_LEN)[own.long()]
    out.left[:count] = drafts


@triton.jit
def next_places_kernel(
    token,  # [rows] int64, as the next
    mapping,
    context,  # [rows] int32, as the next three
    run,
    place,
    left,
    slot_mapping,  # [num_tokens] int64
    rows,
    BLOCK: tl.constexpr,
):
    """A program per BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    after = tl.load(left + row, mask=inside, other=0) - 1
    more = inside & (after > 0)
    following = tl.load(token + row, mask=more, other=-1) + 1
    tl.store(token + row, following, mask=inside)
    tl.store(mapping + row, tl.load(slot_mapping + following, mask=more, other=-1), mask=inside)
    tl.store(context + row, tl.load(context + row, mask=more, other=NO_CONTEXT - 1) + 1, mask=inside)
    tl.store(run + row, tl.load(run + row, mask=more, other=-2) + 1, mask=inside)
    tl.store(place + row, tl.load(place + row, mask=more, other=-1) + 1, mask=inside)
    tl.store(left + row, tl.maximum(after, 0), mask=inside)


def next_places(places: DraftPlaces, slot_mapping: Tensor) -> None:
    """Move on to the next pass; slot_mapping int64 [T]. Rows that have all of their guesses become padding, but for
    their slots and lines."""
    run = launch_next_places if places.token.is_cuda else next_places_reference
    run(places, slot_mapping)


def launch_next_places(places: DraftPlaces, slot_mapping: Tensor) -> None:
    rows = len(places.token)
    next_places_kernel[(triton.cdiv(rows, BLOCK),)](
        places.token, places.mapping, places.context, places.run, places.place, places.left, slot_mapping, rows,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def next_places_reference(places: DraftPlaces, slot_mapping: Tensor) -> None:
    more = places.left > 1
    token = torch.where(more, places.token + 1, 0)
    places.token.copy_(token)
    places.mapping.copy_(torch.where(more, slot_mapping[token], -1))
    for tensor, rest in ((places.context, 2), (places.run, -1), (places.place, 0)):
        tensor.copy_(torch.where(more, tensor + 1, rest))
    places.left.sub_(1).clamp_(min=0)


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
