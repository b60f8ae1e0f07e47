"""One-shot exchange: every rank stores its partial rows into all rooms, and sums all partials itself.

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
    T_ARRIVED,
    T_FAILED,
    T_TURN,
    T_TURNS,
    ExchangeRoom,
    add_row,
    is_last,
    report,
    take_words,
    words_at,
    write_row,
)
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

PUBLISH, CONSUME = 1, 2  # phases; a launch runs both, except in an interpreter, where ranks take turns


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
    at_small,  # byte offset of the areas in a room
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
    """Program p has the rows p, p + programs, ..."""
    bits: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    kind: tl.constexpr = tl.int16 if bits == 16 else tl.int32
    empty: tl.constexpr = -32768 if bits == 16 else -2147483648
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    grid_wait(OVERLAP)
    state = words_at(own, 0, 32)
    turn = tl.load(state + T_TURN)
    area = (turn * RANKS).to(tl.int64) * small
    if PHASES & 1:
        for row in range(first, rows, step):
            at = row * width + column
            words = tl.load(x + at, mask=inside, other=0.0).to(kind, bitcast=True)
            words = tl.where(words == empty, 0, words)
            for other in tl.static_range(RANKS):
                to = words_at(rooms[other], at_small, bits) + area + rank.to(tl.int64) * small
                tl.store(to + at, words, mask=inside, cache_modifier=".wt")
    if PHASES & 2:
        polls = tl.where(tl.load(state + T_FAILED) != 0, 0, polls)
        failed = 0
        for row in range(first, rows, step):
            at = row * width + column
            total = tl.zeros([BLOCK], tl.float32)
            for other in tl.static_range(RANKS):
                mine = words_at(own, at_small, bits) + area + other * small + at
                words, late = take_words(mine, inside, polls, PTX, bits)
                tl.store(mine, tl.full([BLOCK], empty, kind), mask=inside)
                failed |= late
                total += words.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
            if ADD:
                total = add_row(residual, total, row, width, BLOCK)
            if NORM or not ADD:
                write_row(out, weight, total, row, width, eps, NORM, BLOCK)
        report(state, error, failed)
        if is_last(state):
            tl.store(state + T_ARRIVED, 0)
            tl.store(state + T_TURN, tl.where(turn == T_TURNS - 1, 0, turn + 1))


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
            room.addresses[room.rank], room.rank, room.error.data_ptr(), rows, width, layout.offsets[2], layout.small,
            room.polls, eps, RANKS=layout.ranks, ADD=residual is not None, NORM=weight is not None, PHASES=phases,
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
