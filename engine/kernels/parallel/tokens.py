"""The way of tokens from rank 0, which chooses them and guesses drafts, to the slots and steps of the other ranks.

    rank 0     prep | passes of a drafter: guesses -> all ranks | forward | choice, next drafts: words -> all ranks
    rank r     prep | wait: guesses -> token ids of the step    | forward | wait: words -> its slots | next prep

The words are those that the next prep reads of each slot whose row has chosen a token: the newest token, and on a
server with drafts the length, the number of drafts, the drafts, and how probably they count. So every rank deals out
the same drafts and computes the same rows.

A pass sends all tokens of the lines that choose, so a later pass of the step sends the guesses of earlier passes again:
a rank that takes a pass late finds nothing wrong. The passes of the next step come behind the exchanges of a forward,
which wait for the ranks that have taken this step's guesses; so one buffer is enough. It is enough for the words, too
(choice.py). Flags hold numbers that the kernels count on the device, as in choice.py.

Users: engine/parallel/device; thread: device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from _fast.layout import SLOT_WORDS, SlotWord
from engine.kernels.parallel.choice import GUESSES, GUESSES_AT, SLOTS, ChoiceRoom, flag_of
from engine.kernels.parallel.room import T_EPOCH, T_FAILED, T_PASSES, raise_flag, report, wait_flag, words_at
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.step_tensors import SlotTensors, StepInputs
from engine.kernels.target import tl, triton

SENT = SlotWord.LAST_TOKEN, SlotWord.LENGTH, SlotWord.NUM_DRAFTS  # behind them the drafts, then their survivals
LAST_TOKEN, LENGTH, NUM_DRAFTS = (tl.constexpr(int(one)) for one in SENT)
ROW = tl.constexpr(SLOT_WORDS)
T_SLOTS, T_GUESSES, T_GUESSES_AT = tl.constexpr(SLOTS), tl.constexpr(GUESSES), tl.constexpr(GUESSES_AT)
BLOCK = 1024  # words at a time


def words_of(num_drafts: int) -> int:
    """Words that are sent of each slot on a server whose rows have at most so many drafts."""
    return len(SENT) + 2 * num_drafts if num_drafts else 1


def width_of(num_drafts: int) -> int:
    """Places of a row's run, as in StepInputs.sample_row."""
    return num_drafts + 2 if num_drafts else 1


@triton.jit
def newest_lines(sample_row, sample_slot, first, lines, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Row and slot [BLOCK, 1] of the lines from `first` on that are the first of their row; other lines: row -1."""
    line = first + tl.arange(0, BLOCK)[:, None]
    place = tl.load(sample_row + line, mask=line < lines, other=-1)
    newest = (place >= 0) & (place % WIDTH == 0)
    return tl.where(newest, place // WIDTH, -1), tl.load(sample_slot + line, mask=newest, other=0)


@triton.jit
def number_at(place):
    """The number of the slot's word that is sent at a place below 3."""
    return tl.where(place == 0, LAST_TOKEN, tl.where(place == 1, LENGTH, NUM_DRAFTS))


@triton.jit
def send_slots_kernel(
    rooms,  # RANKS addresses
    words,  # [slots, SLOT_WORDS] int32
    drafts,  # [slots, NUM] int32, as the next
    survivals,
    sample_row,  # [most] int32, -1: no row
    sample_slot,  # [most] int32
    num_sampled,  # [1] int32: lines
    most,
    AT: tl.constexpr,  # bytes before the words in a room
    NUM: tl.constexpr,  # most drafts of a slot
    COUNT: tl.constexpr,  # words of a slot
    WORDS: tl.constexpr,  # power of two >= COUNT
    WIDTH: tl.constexpr,  # of a run
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # lines at a time
    OVERLAP: tl.constexpr,
):
    """One program stores the words of all rows into the rooms of the other ranks, and counts the choice."""
    grid_wait(OVERLAP)
    state = words_at(rooms[0], 0, 32)
    epoch = tl.load(state + T_EPOCH) + 1
    lines = tl.minimum(tl.load(num_sampled), most)
    place = tl.arange(0, WORDS)[None, :]
    for first in range(0, lines, BLOCK):
        row, slot = newest_lines(sample_row, sample_slot, first, lines, WIDTH, BLOCK)
        here = (row >= 0) & (place < COUNT)
        values = tl.load(words + slot * ROW + number_at(place), mask=here & (place < 3), other=0)
        if NUM:
            draft, survival = place - 3, place - 3 - NUM
            values += tl.load(drafts + slot * NUM + draft, mask=here & (draft >= 0) & (draft < NUM), other=0)
            values += tl.load(survivals + slot * NUM + survival, mask=here & (survival >= 0), other=0)
        for other in tl.static_range(1, RANKS):
            to = words_at(rooms[other], AT, 32) + row * COUNT + place
            tl.store(to, values, mask=here, cache_modifier=".wt")
    for other in tl.static_range(1, RANKS):
        raise_flag(flag_of(rooms[other], T_SLOTS), epoch)
    tl.debug_barrier()
    tl.store(state + T_EPOCH, epoch)


@triton.jit
def take_slots_kernel(
    words,  # [slots, SLOT_WORDS] int32
    drafts,  # [slots, NUM] int32, as the next
    survivals,
    own,  # address of this rank's room
    sample_row,  # [most] int32, -1: no row
    sample_slot,  # [most] int32
    num_sampled,  # [1] int32: lines
    most,
    error,  # address of an int32
    polls,
    AT: tl.constexpr,  # from here on as in send_slots_kernel
    NUM: tl.constexpr,
    COUNT: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program waits for the words, writes them into their slots, and counts the choice."""
    grid_wait(OVERLAP)
    state = words_at(own, 0, 32)
    epoch = tl.load(state + T_EPOCH) + 1
    polls = tl.where(tl.load(state + T_FAILED) != 0, 0, polls)
    failed = wait_flag(flag_of(own, T_SLOTS), epoch, polls, state, MAPPED)
    lines = tl.minimum(tl.load(num_sampled), most)
    place = tl.arange(0, WORDS)[None, :]
    for first in range(0, lines, BLOCK):
        row, slot = newest_lines(sample_row, sample_slot, first, lines, WIDTH, BLOCK)
        here = (row >= 0) & (place < COUNT)
        found = words_at(own, AT, 32) + row * COUNT + place
        values = tl.load(found, mask=here, other=0, cache_modifier=".cv")
        tl.store(words + slot * ROW + number_at(place), values, mask=here & (place < 3))
        if NUM:
            draft, survival = place - 3, place - 3 - NUM
            tl.store(drafts + slot * NUM + draft, values, mask=here & (draft >= 0) & (draft < NUM))
            tl.store(survivals + slot * NUM + survival, values, mask=here & (survival >= 0))
    report(state, error, failed)
    tl.debug_barrier()
    tl.store(state + T_EPOCH, epoch)


@triton.jit
def send_guesses_kernel(
    rooms,  # RANKS addresses
    token_ids,  # [num_tokens] int64
    sample_index,  # [most] int64
    num_sampled,  # [1] int32: lines
    most,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # lines at a time
    OVERLAP: tl.constexpr,
):
    """One program stores the tokens of all lines into the rooms of the other ranks, and counts the pass."""
    grid_wait(OVERLAP)
    state = words_at(rooms[0], 0, 32)
    epoch = tl.load(state + T_PASSES) + 1
    lines = tl.minimum(tl.load(num_sampled), most)
    for first in range(0, lines, BLOCK):
        line = first + tl.arange(0, BLOCK)
        at = tl.load(sample_index + line, mask=line < lines, other=0)
        token = tl.load(token_ids + at, mask=line < lines, other=0).to(tl.int32)
        for other in tl.static_range(1, RANKS):
            to = words_at(rooms[other], T_GUESSES_AT, 32) + line
            tl.store(to, token, mask=line < lines, cache_modifier=".wt")
    for other in tl.static_range(1, RANKS):
        raise_flag(flag_of(rooms[other], T_GUESSES), epoch)
    tl.debug_barrier()
    tl.store(state + T_PASSES, epoch)


@triton.jit
def take_guesses_kernel(
    token_ids,  # [num_tokens] int64
    own,  # address of this rank's room
    sample_index,  # [most] int64
    num_sampled,  # [1] int32: lines
    most,
    error,  # address of an int32
    polls,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,  # lines at a time
    OVERLAP: tl.constexpr,
):
    """One program waits for the tokens of a pass, writes them into the step, and counts the pass."""
    grid_wait(OVERLAP)
    state = words_at(own, 0, 32)
    epoch = tl.load(state + T_PASSES) + 1
    polls = tl.where(tl.load(state + T_FAILED) != 0, 0, polls)
    failed = wait_flag(flag_of(own, T_GUESSES), epoch, polls, state, MAPPED)
    lines = tl.minimum(tl.load(num_sampled), most)
    for first in range(0, lines, BLOCK):
        line = first + tl.arange(0, BLOCK)
        at = tl.load(sample_index + line, mask=line < lines, other=0)
        found = words_at(own, T_GUESSES_AT, 32) + line
        token = tl.load(found, mask=line < lines, other=0, cache_modifier=".cv")
        tl.store(token_ids + at, token.to(tl.int64), mask=line < lines)
    report(state, error, failed)
    tl.debug_barrier()
    tl.store(state + T_PASSES, epoch)


def send_slots(room: ChoiceRoom, inputs: StepInputs, slots: SlotTensors) -> None:
    """Launch on rank 0: the words of the step's rows that have chosen a token go to all other ranks."""
    number, most = slots.drafts.shape[1], inputs.sample_row.numel()
    count = words_of(number)
    assert not room.rank, "rank 0 has the words"
    assert room.slots_at + 4 * count * inputs.row_slot.numel() <= room.memory.numel(), "words that fit"
    words = triton.next_power_of_2(count)
    send_slots_kernel[(1,)](
        room.addresses, slots.words, slots.drafts, slots.survivals.survivals, inputs.sample_row, inputs.sample_slot,
        inputs.num_sampled, most, AT=room.slots_at, NUM=number, COUNT=count, WORDS=words, WIDTH=width_of(number),
        RANKS=len(room.addresses), BLOCK=_lines(most, words), num_warps=4, **launch_options(),
    )  # fmt: skip


def take_slots(room: ChoiceRoom, inputs: StepInputs, slots: SlotTensors) -> None:
    """Launch on another rank: waits for the words of the step's rows that have chosen a token; updates `slots`."""
    number, most = slots.drafts.shape[1], inputs.sample_row.numel()
    count = words_of(number)
    words = triton.next_power_of_2(count)
    take_slots_kernel[(1,)](
        slots.words, slots.drafts, slots.survivals.survivals, room.addresses[room.rank], inputs.sample_row,
        inputs.sample_slot, inputs.num_sampled, most, room.error.data_ptr(), room.polls, AT=room.slots_at, NUM=number,
        COUNT=count, WORDS=words, WIDTH=width_of(number), MAPPED=room.mapped, BLOCK=_lines(most, words), num_warps=4,
        **launch_options(),
    )  # fmt: skip


def send_guesses(room: ChoiceRoom, inputs: StepInputs) -> None:
    """Launch on rank 0, behind a pass of a drafter: the step's tokens at its lines go to all other ranks."""
    most = inputs.sample_index.numel()
    assert not room.rank, "rank 0 has the drafter"
    assert GUESSES_AT + 4 * most <= room.slots_at, "lines that fit"
    send_guesses_kernel[(1,)](
        room.addresses, inputs.token_ids, inputs.sample_index, inputs.num_sampled, most, RANKS=len(room.addresses),
        BLOCK=_lines(most, 1), num_warps=4, **launch_options(),
    )  # fmt: skip


def take_guesses(room: ChoiceRoom, inputs: StepInputs) -> None:
    """Launch on another rank: waits for the tokens at the step's lines, which replace those of inputs.token_ids."""
    most = inputs.sample_index.numel()
    take_guesses_kernel[(1,)](
        inputs.token_ids, room.addresses[room.rank], inputs.sample_index, inputs.num_sampled, most,
        room.error.data_ptr(), room.polls, MAPPED=room.mapped, BLOCK=_lines(most, 1), num_warps=4, **launch_options(),
    )  # fmt: skip


def _lines(most: int, words: int) -> int:
    """Lines at a time, each with so many words, a power of two."""
    return min(triton.next_power_of_2(most), max(1, BLOCK // words))


def sent_slots(inputs: StepInputs, slots: SlotTensors) -> Tensor:
    """The words that rank 0 sends, int32 [max_rows, words of a slot]; 0 of rows that have not chosen a token."""
    rows, own = _newest(inputs, slots)
    sent = slots.words.new_zeros(inputs.row_slot.numel(), words_of(slots.drafts.shape[1]))
    if slots.drafts.shape[1]:
        found = slots.words[own][:, list(SENT)], slots.drafts[own], slots.survivals.survivals[own]
        sent[rows] = torch.cat(found, 1)
    else:
        sent[rows, 0] = slots.word(SlotWord.LAST_TOKEN)[own]
    return sent


def send_slots_reference(rooms: Sequence[ChoiceRoom], inputs: StepInputs, slots: SlotTensors) -> None:
    """The same on tensors: what lies in the rooms of the other ranks behind their flags."""
    rows, _ = _newest(inputs, slots)
    sent = sent_slots(inputs, slots)
    for room in rooms[1:]:
        memory = room.memory[room.slots_at : room.slots_at + 4 * sent.numel()].view(torch.int32).view(sent.shape)
        memory[rows] = sent[rows]


def take_slots_reference(sent: Tensor, inputs: StepInputs, slots: SlotTensors) -> None:
    """The same on tensors: sent int32 [max_rows, words of a slot], of rank 0."""
    rows, own = _newest(inputs, slots)
    number, found = slots.drafts.shape[1], sent[rows]
    slots.word(SlotWord.LAST_TOKEN)[own] = found[:, 0]
    if number:
        for place, one in enumerate(SENT):
            slots.word(one)[own] = found[:, place]
        slots.drafts[own] = found[:, len(SENT) : len(SENT) + number]
        slots.survivals.survivals[own] = found[:, len(SENT) + number :]


def _newest(inputs: StepInputs, slots: SlotTensors) -> tuple[Tensor, Tensor]:
    """Rows that have chosen a token, and their slots, int64."""
    width = width_of(slots.drafts.shape[1])
    newest = (inputs.sample_row >= 0) & (inputs.sample_row % width == 0)
    return inputs.sample_row[newest].long() // width, inputs.sample_slot[newest].long()


def sent_guesses(inputs: StepInputs) -> Tensor:
    """The tokens that rank 0 sends behind a pass, int32 [lines]."""
    return inputs.token_ids[inputs.sample_index[: int(inputs.num_sampled)]].int()


def send_guesses_reference(rooms: Sequence[ChoiceRoom], inputs: StepInputs) -> None:
    """The same on tensors: what lies in the rooms of the other ranks behind their flags."""
    sent = sent_guesses(inputs)
    for room in rooms[1:]:
        room.memory[GUESSES_AT : GUESSES_AT + 4 * len(sent)].view(torch.int32).copy_(sent)


def take_guesses_reference(sent: Tensor, inputs: StepInputs) -> None:
    """The same on tensors: sent int32 [lines], of rank 0."""
    inputs.token_ids[inputs.sample_index[: len(sent)]] = sent.long()
