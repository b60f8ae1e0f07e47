"""The way of logits to rank 0, which chooses all tokens. The way of the tokens to the other ranks: tokens.py.

    rank r     logits of its part of the vocabulary -> rank 0 | wait | newest tokens of its slots
    rank 0     wait, all logits | choice | newest tokens -> all ranks

A rank sends the logits of its next choice only after it has the tokens of this choice, so one buffer of logits and one
of tokens are enough. Both ways have a flag that holds the number of the choice, which the kernels count on the device:
captured graphs of all sizes can be replayed in any order. A choice without `send_logits` is possible, one without
`send_slots` is not.

Users: engine/parallel/device; thread: device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
from engine.kernels.target import tl, triton

FLAG_WORDS = 32  # words between two flags, so that they lie in different lines of a cache
T_FLAGS, T_FLAG_WORDS = tl.constexpr(4 * STATE_WORDS), tl.constexpr(FLAG_WORDS)
GUESSES_AT = 4 * (STATE_WORDS + MOST_RANKS * FLAG_WORDS)  # bytes before the guesses
SLOTS, GUESSES = range(2)  # flags in the rooms of other ranks than rank 0
BLOCK = 2048  # logits of a program


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceRoom:
    """One rank's words: a state as ExchangeRoom's, and flags; then, on other ranks than rank 0, what rank 0 sends:
    guesses, int32 [lines], and words of slots, int32 [words].

    The flags of rank 0's room are those of the other ranks, which set them with their logits. In another rank's room
    rank 0 sets SLOTS with the words of slots, and GUESSES with the guesses.
    """

    rank: int
    memory: Tensor  # uint8
    slots_at: int  # bytes before the words of slots
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
    words: int,
    lines: int,
    vocab: int,
    dtype: torch.dtype,
    devices: Sequence[torch.device | str],
    error: Tensor,
    mapped: Callable[[int], Tensor] | None = None,
) -> list[ChoiceRoom]:
    """The rooms of all ranks, for so many `words` of slots and logits [lines, vocab] of this dtype; `mapped`: as in
    make_rooms."""
    size = lines * vocab * dtype.itemsize
    logits = memories_of(size, devices[:1], mapped)[0].view(dtype).view(lines, vocab)
    slots_at = GUESSES_AT + -(-lines // 4) * 16
    memories = memories_of(slots_at + 4 * words, devices, mapped)
    addresses = tuple(memory.data_ptr() for memory in memories)
    return [
        ChoiceRoom(
            rank,
            memory,
            slots_at,
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
