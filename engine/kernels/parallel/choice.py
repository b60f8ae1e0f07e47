"""The way of logits to rank 0, which chooses all tokens, and the way of the tokens to the other ranks.

    rank r     logits of its part of the vocabulary -> rank 0 | wait | LAST_TOKEN of its slots
    rank 0     wait, all logits | choice | tokens -> all ranks

A rank sends the logits of its next choice only after it has the tokens of this choice, so one buffer of logits and one
of tokens are enough. Both ways have a flag that holds the number of the choice, which the kernels count on the device:
captured graphs of all sizes can be replayed in any order. A choice without `send_logits` is possible, one without
`send_tokens` is not.

Users: engine/parallel/device; thread: device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.parallel.room import (
    MOST_RANKS,
    POLLS,
    STATE_WORDS,
    T_ARRIVED,
    T_EPOCH,
    T_FAILED,
    memories_of,
    polls_of,
    raise_flag,
    report,
    wait_flag,
    words_at,
)
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.step_tensors import SlotTensors, StepInputs, word
from engine.kernels.target import tl, triton

FLAG_WORDS = 32  # words between two flags, so that they lie in different lines of a cache
T_FLAGS, T_FLAG_WORDS = tl.constexpr(4 * STATE_WORDS), tl.constexpr(FLAG_WORDS)
TOKENS_AT = 4 * (STATE_WORDS + MOST_RANKS * FLAG_WORDS)  # bytes before the tokens
LAST_TOKEN = tl.constexpr(int(SlotWord.LAST_TOKEN))
BLOCK = 2048  # logits of a program


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceRoom:
    """One rank's words: a state as ExchangeRoom's, a flag per rank (rank 0's is set with the tokens), the tokens."""

    rank: int
    memory: Tensor  # uint8
    addresses: tuple[int, ...]  # of all ranks' rooms, in rank order
    logits: Tensor | None  # rank 0 alone: [lines, vocab]
    logits_at: int  # address of rank 0's logits
    columns: int  # of `logits`
    error: Tensor  # int32 [1] that the host can read
    polls: int = POLLS
    mapped: bool = False  # words and logits are host memory

    def state(self) -> Tensor:
        """A view of the counters, int32 [STATE_WORDS]."""
        return self.memory[: 4 * STATE_WORDS].view(torch.int32)


def make_choice_rooms(
    tokens: int,
    lines: int,
    vocab: int,
    dtype: torch.dtype,
    devices: Sequence[torch.device | str],
    error: Tensor,
    mapped: Callable[[int], Tensor] | None = None,
) -> list[ChoiceRoom]:
    """The rooms of all ranks, for `tokens` places of tokens and logits [lines, vocab] of this dtype; `mapped`: as in
    make_rooms."""
    size = lines * vocab * dtype.itemsize
    logits = memories_of(size, devices[:1], mapped)[0].view(dtype).view(lines, vocab)
    memories = memories_of(TOKENS_AT + 4 * tokens, devices, mapped)
    addresses = tuple(memory.data_ptr() for memory in memories)
    return [
        ChoiceRoom(
            rank,
            memory,
            addresses,
            None if rank else logits,
            logits.data_ptr(),
            vocab,
            error,
            polls_of(mapped),
            mapped is not None,
        )
        for rank, memory in enumerate(memories)
    ]


@triton.jit
def flag_of(room, rank):
    """The address of a rank's flag in a room."""
    return words_at(room, T_FLAGS, 32) + rank * T_FLAG_WORDS


@triton.jit(do_not_specialize=("rank",))
def send_logits_kernel(
    logits,  # address of rank 0's [lines, columns]
    part,  # [rows, width]: this rank's logits
    first,  # address of rank 0's room
    own,  # address of this rank's room
    rank,
    column,  # where the part begins
    columns,
    width,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program copies BLOCK logits of a row; the last program sets the flag."""
    grid_wait(OVERLAP)
    state = words_at(own, 0, 32)
    epoch = tl.load(state + T_EPOCH) + 1
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.multiple_of(logits.to(tl.pointer_type(part.dtype.element_ty)), 16) + row * columns + column + place
    values = tl.load(part + row * width + place, mask=place < width)
    tl.store(to, values, mask=place < width, cache_modifier=".wt")
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(state + T_ARRIVED, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(state + T_ARRIVED, 0)
        raise_flag(flag_of(first, rank), epoch)


@triton.jit
def await_logits_kernel(own, error, polls, RANKS: tl.constexpr, MAPPED: tl.constexpr, OVERLAP: tl.constexpr):
    """One program waits for the logits of all other ranks."""
    grid_wait(OVERLAP)
    state = words_at(own, 0, 32)
    epoch = tl.load(state + T_EPOCH) + 1
    polls = tl.where(tl.load(state + T_FAILED) != 0, 0, polls)
    failed = 0
    for other in tl.static_range(1, RANKS):
        failed |= wait_flag(flag_of(own, other), epoch, polls, state, MAPPED)
    report(state, error, failed)


@triton.jit
def fetch_logits_kernel(
    out,  # [rows, columns]
    logits,  # address of [lines, columns] in host memory
    part,  # [rows, width]: rank 0's logits, the first columns
    columns,
    width,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program copies BLOCK logits of a row."""
    grid_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    others = logits.to(tl.pointer_type(out.dtype.element_ty)) + row * columns + place
    values = tl.load(others, mask=(place >= width) & (place < columns), other=0.0, cache_modifier=".cv")
    own = tl.load(part + row * width + place, mask=place < width, other=0.0)
    tl.store(out + row * columns + place, tl.where(place < width, own, values), mask=place < columns)


@triton.jit
def send_tokens_kernel(
    rooms,  # RANKS addresses
    tokens,  # [count] int32
    count,
    TOKENS_AT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= count
    OVERLAP: tl.constexpr,
):
    """One program stores the tokens of all rows into the rooms of the other ranks, and counts the choice."""
    grid_wait(OVERLAP)
    state = words_at(rooms[0], 0, 32)
    epoch = tl.load(state + T_EPOCH) + 1
    place = tl.arange(0, BLOCK)
    values = tl.load(tokens + place, mask=place < count, other=0)
    for other in tl.static_range(1, RANKS):
        tl.store(words_at(rooms[other], TOKENS_AT, 32) + place, values, mask=place < count, cache_modifier=".wt")
        raise_flag(flag_of(rooms[other], 0), epoch)
    tl.debug_barrier()
    tl.store(state + T_EPOCH, epoch)


@triton.jit
def take_tokens_kernel(
    words,  # [slots, SLOT_WORDS] int32
    own,  # address of this rank's room
    sample_row,  # [lines] int32, -1: no row
    sample_slot,  # [lines] int32
    lines,
    error,  # address of an int32
    polls,
    TOKENS_AT: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= lines
    OVERLAP: tl.constexpr,
):
    """One program waits for the tokens, writes them into the words of their slots, and counts the choice."""
    grid_wait(OVERLAP)
    state = words_at(own, 0, 32)
    epoch = tl.load(state + T_EPOCH) + 1
    polls = tl.where(tl.load(state + T_FAILED) != 0, 0, polls)
    failed = wait_flag(flag_of(own, 0), epoch, polls, state, MAPPED)
    line = tl.arange(0, BLOCK)
    row = tl.load(sample_row + line, mask=line < lines, other=-1)
    slot = tl.load(sample_slot + line, mask=row >= 0, other=0)
    token = tl.load(words_at(own, TOKENS_AT, 32) + row, mask=row >= 0, other=0, cache_modifier=".cv")
    tl.store(word(words, slot, LAST_TOKEN), tl.maximum(token, 0), mask=row >= 0)
    report(state, error, failed)
    tl.debug_barrier()
    tl.store(state + T_EPOCH, epoch)


def send_logits(room: ChoiceRoom, part: Tensor, column: int) -> None:
    """Launch: part [rows, width] contiguous, the logits from token `column` on, go to rank 0."""
    rows, width = part.shape
    assert room.rank and part.is_contiguous() and column + width <= room.columns, "logits that fit"
    if rows:
        send_logits_kernel[(rows, triton.cdiv(width, BLOCK))](
            room.logits_at, part, room.addresses[0], room.addresses[room.rank], room.rank, column, room.columns, width,
            BLOCK=BLOCK, num_warps=4, **launch_options(),
        )  # fmt: skip


def send_logits_reference(whole: Tensor, part: Tensor, column: int) -> None:
    """The same on tensors: whole [lines, vocab], of rank 0."""
    whole[: len(part), column : column + part.shape[1]] = part


def await_logits(room: ChoiceRoom, part: Tensor) -> Tensor:
    """Launch on rank 0: part [rows, width], its own logits -> [rows, vocab], valid until the next choice."""
    assert room.logits is not None and len(part) <= len(room.logits), "rank 0, and logits that fit"
    whole = room.logits[: len(part)]
    if not room.mapped:
        whole[:, : part.shape[1]].copy_(part)
    if len(part):
        await_logits_kernel[(1,)](
            room.addresses[0], room.error.data_ptr(), room.polls, RANKS=len(room.addresses), MAPPED=room.mapped,
            num_warps=1, **launch_options(),
        )  # fmt: skip
    return fetch_logits(room, part) if room.mapped else whole


def fetch_logits(room: ChoiceRoom, part: Tensor) -> Tensor:
    """Launch on rank 0, once the others' logits are in host memory: part [rows, width] -> a new [rows, vocab]."""
    rows, width = part.shape
    part = part.contiguous()
    out = part.new_empty(rows, room.columns)
    if rows:
        fetch_logits_kernel[(rows, triton.cdiv(room.columns, BLOCK))](
            out, room.logits_at, part, room.columns, width, BLOCK=BLOCK, num_warps=4, **launch_options()
        )
    return out


def fetch_logits_reference(whole: Tensor, part: Tensor) -> Tensor:
    """The same on tensors: whole [lines, vocab] has the other ranks' logits."""
    return torch.cat([part, whole[: len(part), part.shape[1] :]], 1)


def await_logits_reference(whole: Tensor, part: Tensor) -> Tensor:
    """The same on tensors, after the other ranks' parts."""
    whole[: len(part), : part.shape[1]] = part
    return whole[: len(part)]


def send_tokens(room: ChoiceRoom, tokens: Tensor) -> None:
    """Launch on rank 0: tokens int32 [places] go to all other ranks."""
    assert not room.rank and tokens.dtype is torch.int32 and tokens.is_contiguous(), "rank 0's tokens"
    assert TOKENS_AT + 4 * tokens.numel() <= room.memory.numel(), "tokens that fit"
    send_tokens_kernel[(1,)](
        room.addresses, tokens, tokens.numel(), TOKENS_AT=TOKENS_AT, RANKS=len(room.addresses),
        BLOCK=triton.next_power_of_2(tokens.numel()), num_warps=4, **launch_options(),
    )  # fmt: skip


def send_tokens_reference(rooms: Sequence[ChoiceRoom], tokens: Tensor) -> None:
    """The same on tensors: what lies in the rooms of the other ranks behind their flags."""
    for room in rooms[1:]:
        room.memory[TOKENS_AT : TOKENS_AT + 4 * tokens.numel()].view(torch.int32).copy_(tokens)


def take_tokens(room: ChoiceRoom, inputs: StepInputs, slots: SlotTensors) -> None:
    """Launch on another rank: waits for the tokens of the step's sampled rows, and writes SlotWord.LAST_TOKEN."""
    lines = inputs.sample_row.numel()
    take_tokens_kernel[(1,)](
        slots.words, room.addresses[room.rank], inputs.sample_row, inputs.sample_slot, lines, room.error.data_ptr(),
        room.polls, TOKENS_AT=TOKENS_AT, MAPPED=room.mapped, BLOCK=triton.next_power_of_2(lines), num_warps=4,
        **launch_options(),
    )  # fmt: skip


def take_tokens_reference(tokens: Tensor, inputs: StepInputs, slots: SlotTensors) -> None:
    """The same on tensors: tokens int32 [places], of rank 0."""
    chosen = inputs.sample_row >= 0
    rows, places = inputs.sample_slot[chosen].long(), inputs.sample_row[chosen].long()
    slots.word(SlotWord.LAST_TOKEN)[rows] = tokens[places].clamp(min=0)
