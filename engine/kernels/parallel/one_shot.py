"""One-shot exchange: every rank stores its partial rows into the others' rooms, and sums all partials itself.

    total = partial of rank 0 + partial of rank 1 + ...          float32, in rank order
    residual += total (ADD)         out = norm(residual) (NORM), or total

One wait and no barrier: values are their own flags (room.take_words). An area of the room is used again three
exchanges later; until then its reader has emptied it. Partials that are -0.0 are stored as 0.0. A program has whole
rows; all programs are resident at once, because a program waits for its peers'.

Users: exchange.py; thread: device, in captured graphs too.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.parallel.room import (
    T_FAILED,
    T_TURNS,
    ExchangeRoom,
    report,
    scale_of,
    take_words,
    words_at,
    write_row,
)
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

PUBLISH, CONSUME = 1, 2  # phases; a launch runs both, except in an interpreter, where ranks take turns


@triton.jit
def words_of(x, row, width, BLOCK: tl.constexpr):
    """A row's values as integers [BLOCK], none of which is the mark of an empty place."""
    kind: tl.constexpr = tl.int16 if x.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    empty: tl.constexpr = -32768 if x.dtype.element_ty.primitive_bitwidth == 16 else -2147483648
    column = tl.arange(0, BLOCK)
    words = tl.load(x + row * width + column, mask=column < width, other=0.0).to(kind, bitcast=True)
    return tl.where(words == empty, 0, words)


@triton.jit
def publish(words, rooms, rank, at_small, small, turn, row, width, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Store a row's words into the other ranks' rooms."""
    column = tl.arange(0, BLOCK)
    place = (turn * RANKS + rank).to(tl.int64) * small + row * width
    for other in tl.static_range(RANKS):
        if other != rank:
            to = words_at(rooms[other], at_small, words.dtype.primitive_bitwidth) + place
            tl.store(to + column, words, mask=column < width, cache_modifier=".wt")


@triton.jit
def consume(words, own, rank, at_small, small, turn, row, width, polls, kind: tl.constexpr, RANKS: tl.constexpr,
            PTX: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The sum of a row's partials, float32 [BLOCK], and 1 if polls ran out; `words`: the own partial."""
    bits: tl.constexpr = words.dtype.primitive_bitwidth
    empty: tl.constexpr = -32768 if bits == 16 else -2147483648
    column = tl.arange(0, BLOCK)
    inside = column < width
    total, failed = tl.zeros([BLOCK], tl.float32), 0
    for other in tl.static_range(RANKS):
        part = words
        if other != rank:
            place = (turn * RANKS + other).to(tl.int64) * small + row * width
            there = words_at(own, at_small, bits) + place + column
            part, late = take_words(there, inside, polls, PTX, bits)
            tl.store(there, tl.full([BLOCK], empty, words.dtype), mask=inside)
            failed |= late
        total += part.to(kind, bitcast=True).to(tl.float32)
    return total, failed


@triton.jit
def finish(out, residual, rest, scale, total, row, width, eps, ADD: tl.constexpr, NORM: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Add a row's sum to `rest`, the residual's row, and write the results."""
    column = tl.arange(0, BLOCK)
    if ADD:
        rounded = (total + rest).to(residual.dtype.element_ty)
        tl.store(residual + row * width + column, rounded, mask=column < width)
        total = rounded.to(tl.float32)
    if NORM or not ADD:
        write_row(out, scale, total, row, width, eps, NORM, BLOCK)


@triton.jit
def residual_of(residual, row, width, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """The residual's row, float32 [BLOCK]."""
    column = tl.arange(0, BLOCK)
    if ADD:
        return tl.load(residual + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    else:
        return tl.zeros([BLOCK], tl.float32)


@triton.jit
def next_turn(turn):
    """The area of a row's next exchange."""
    return tl.where(turn == T_TURNS - 1, 0, turn + 1)


@triton.jit(do_not_specialize=("rank", "rows"))
def one_shot_kernel(
    out,  # [rows, width] when NORM or not ADD
    residual,  # [rows, width] when ADD, in place
    x,  # [rows, width]: this rank's partial
    weight,  # [width] float32 when NORM
    rooms,  # RANKS addresses
    own,  # this rank's address in `rooms`
    rank,
    error,  # address of an int32
    rows,
    width,
    at_turns,  # byte offsets of the areas in a room
    at_small,
    small,  # values of an area, per rank
    polls,
    eps,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PHASES: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= width
    OVERLAP: tl.constexpr,
):
    """Program p has the rows p, p + programs, ... All that its first row needs is read before anything is awaited."""
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    scale = scale_of(weight, width, NORM, BLOCK)
    grid_wait(OVERLAP)
    turns, state = words_at(own, at_turns, 32), words_at(own, 0, 32)
    turn, failed = tl.load(turns + first), tl.load(state + T_FAILED)
    words = words_of(x, first, width, BLOCK)
    rest = residual_of(residual, first, width, ADD, BLOCK)
    if PHASES & 1:
        publish(words, rooms, rank, at_small, small, turn, first, width, RANKS, BLOCK)
        for row in range(first + step, rows, step):
            line = words_of(x, row, width, BLOCK)
            publish(line, rooms, rank, at_small, small, tl.load(turns + row), row, width, RANKS, BLOCK)
    if PHASES & 2:
        kind: tl.constexpr = x.dtype.element_ty
        polls = tl.where(failed != 0, 0, polls)
        total, failed = consume(
            words, own, rank, at_small, small, turn, first, width, polls, kind, RANKS, PTX, BLOCK
        )  # fmt: skip
        finish(out, residual, rest, scale, total, first, width, eps, ADD, NORM, BLOCK)
        tl.store(turns + first, next_turn(turn))
        for row in range(first + step, rows, step):
            turn = tl.load(turns + row)
            line = words_of(x, row, width, BLOCK)
            total, late = consume(line, own, rank, at_small, small, turn, row, width, polls, kind, RANKS, PTX, BLOCK)
            failed |= late
            line_rest = residual_of(residual, row, width, ADD, BLOCK)
            finish(out, residual, line_rest, scale, total, row, width, eps, ADD, NORM, BLOCK)
            tl.store(turns + row, next_turn(turn))
        report(state, error, failed)


def launch_one_shot(
    room: ExchangeRoom,
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    programs: int = 0,
    phases: int = PUBLISH | CONSUME,
) -> Tensor:
    """Launch the kernel: x [rows, width] contiguous, at most room.layout.small values -> `out` or a new tensor.

    The result is norm(residual), if `weight` (float32 [width]) is given, the residual, or the sum. `programs`: at most
    so many programs, all resident; 0: one per unit of the device.
    """
    layout, (rows, width) = room.layout, x.shape
    assert x.is_contiguous() and x.dtype is layout.dtype, "a contiguous partial in the room's dtype"
    assert width == layout.width and rows * width <= layout.small, "a partial that fits an area of the room"
    out = result_of(x, residual, weight, out)
    block = triton.next_power_of_2(width)
    grid = min(rows, programs or target().num_units)
    if rows:
        one_shot_kernel[(grid,)](
            out, x if residual is None else residual, x, x if weight is None else weight, room.addresses,
            room.addresses[room.rank], room.rank, room.error.data_ptr(), rows, width, layout.offsets[0],
            layout.offsets[3], layout.small, room.polls, eps, RANKS=layout.ranks, ADD=residual is not None,
            NORM=weight is not None, PHASES=phases,
            PTX=target().runs_ptx, BLOCK=block, num_warps=warps_of(block), **launch_options(),
        )  # fmt: skip
    return out


def result_of(x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor | None) -> Tensor:
    """The tensor of an exchange's result."""
    if residual is not None:
        assert residual.shape == x.shape and residual.is_contiguous() and residual.dtype is x.dtype
        if weight is None:
            return residual
    return torch.empty_like(x) if out is None else out


def warps_of(block: int) -> int:
    """Warps of a program that has a row of `block` values."""
    return min(16, max(1, block // 512))
