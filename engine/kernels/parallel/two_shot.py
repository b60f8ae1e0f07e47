"""Two-shot exchange, for many rows: each rank sums its share of the rows, and stores the sums into all rooms.

    phase 1    store the own partial of every batch of rows into the room of the rank that sums the batch
    phase 2    of the own batches: total = partial of rank 0 + partial of rank 1 + ..., float32, in rank order;
               residual += total (ADD); store the rounded result into all rooms
    phase 3    of every batch: take the result; out = norm(result) (NORM)

Batch b belongs to rank b % ranks. The bits equal one-shot's: the rows that travel are rounded as the residual is. Every
rank computes the norms of all rows, because reading a row from the own memory costs less than its way between devices,
so each rank has the whole residual stream. A flag per batch (room.raise_flag, room.wait_flag) holds the epoch.

An area needs no second copy: a rank pushes partials again only after it has taken all sums of the exchange before, and
a rank stores sums again only after it has all partials, which every rank computed after it had read the older sums.

Users: exchange.py; thread: device, in captured graphs too.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from torch import Tensor

from engine.kernels.parallel.one_shot import result_of, warps_of
from engine.kernels.parallel.room import (
    BATCH,
    T_ARRIVED,
    T_EPOCH,
    T_FAILED,
    ExchangeRoom,
    is_last,
    raise_flag,
    report,
    scale_of,
    wait_flag,
    words_at,
    write_row,
)
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

PUSH, REDUCE, TAKE = 1, 2, 4  # phases; a launch runs all, except in an interpreter, where ranks take turns


@triton.jit
def room_values(address, offset, like):
    """A pointer to values of the exchange's dtype, `offset` bytes after an address."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def room_flags(address, offset):
    """A pointer to flags, `offset` bytes after an address."""
    return words_at(address, offset, 32)


@triton.jit
def push(x, rooms, rank, batch, rows, width, at_pushed, at_partials, most_batches, stride, epoch, RANKS: tl.constexpr,
         BATCH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Phase 1 of a batch."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    for owner in tl.static_range(RANKS):
        if batch % RANKS == owner:
            to = room_values(rooms[owner], at_partials, x) + rank * stride
            for row in range(batch * BATCH, tl.minimum(rows, batch * BATCH + BATCH)):
                at = (batch // RANKS * BATCH + row - batch * BATCH) * width + column
                part = tl.load(x + row * width + column, mask=inside)
                tl.store(to + at, part, mask=inside, cache_modifier=".wt")
            raise_flag(room_flags(rooms[owner], at_pushed) + rank * most_batches + batch, epoch)


@triton.jit
def reduce(x, residual, rooms, own, batch, rows, width, at_pushed, at_gathered, at_partials, at_sums, most_batches,
           stride, epoch, polls, state, MAPPED: tl.constexpr, RANKS: tl.constexpr, ADD: tl.constexpr,
           BATCH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Phase 2 of an own batch -> 1 if polls ran out."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    mine, failed = room_values(own, at_partials, x), 0
    for other in tl.static_range(RANKS):
        failed |= wait_flag(room_flags(own, at_pushed) + other * most_batches + batch, epoch, polls, state, MAPPED)
    for row in range(batch * BATCH, tl.minimum(rows, batch * BATCH + BATCH)):
        place = (batch // RANKS * BATCH + row - batch * BATCH) * width + column
        at = row * width + column
        total = tl.zeros([BLOCK], tl.float32)
        for other in tl.static_range(RANKS):
            part = mine + other * stride + place
            total += tl.load(part, mask=inside, other=0.0, cache_modifier=".cv").to(tl.float32)
        if ADD:
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        for other in tl.static_range(RANKS):
            sums = room_values(rooms[other], at_sums, x)
            tl.store(sums + at, total.to(x.dtype.element_ty), mask=inside, cache_modifier=".wt")
    for other in tl.static_range(RANKS):
        raise_flag(room_flags(rooms[other], at_gathered) + batch, epoch)
    return failed


@triton.jit
def take(out, residual, x, scale, own, batch, rows, width, at_gathered, at_sums, epoch, polls, state, eps,
         MAPPED: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, BATCH: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """Phase 3 of a batch -> 1 if polls ran out."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    sums = room_values(own, at_sums, x)
    failed = wait_flag(room_flags(own, at_gathered) + batch, epoch, polls, state, MAPPED)
    for row in range(batch * BATCH, tl.minimum(rows, batch * BATCH + BATCH)):
        at = row * width + column
        total = tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cv")
        if ADD:
            tl.store(residual + at, total, mask=inside)
        if NORM or not ADD:
            write_row(out, scale, total.to(tl.float32), row, width, eps, NORM, BLOCK)
    return failed


@triton.jit(do_not_specialize=("rank", "rows"))
def two_shot_kernel(
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
    at_pushed,  # byte offsets of the areas in a room
    at_gathered,
    at_partials,
    at_sums,
    most_batches,  # of the layout: the stride of `pushed`
    own_rows,  # of the layout: the stride of `partials`
    polls,
    eps,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PHASES: tl.constexpr,
    BATCH: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= width
    OVERLAP: tl.constexpr,
):
    """Program p has the batches p, p + programs, ... of phases 1 and 3, and every p-th own batch of phase 2. It takes
    RANKS batches in each round, and phase n of a batch n - 1 rounds later: so rows travel while others are summed."""
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    batches = tl.cdiv(rows, BATCH)
    stride = own_rows.to(tl.int64) * width
    scale = scale_of(weight, width, NORM, BLOCK)
    grid_wait(OVERLAP)
    state = words_at(own, 0, 32)
    epoch = tl.load(state + T_EPOCH) + 1
    polls = tl.where(tl.load(state + T_FAILED) != 0, 0, polls)
    failed = 0
    for turn in range(tl.cdiv(batches, step * RANKS) + 2):
        if PHASES & 1:
            for part in tl.static_range(RANKS):
                batch = first + (turn * RANKS + part) * step
                if batch < batches:
                    push(
                        x, rooms, rank, batch, rows, width, at_pushed, at_partials, most_batches, stride, epoch,
                        RANKS, BATCH, BLOCK,
                    )  # fmt: skip
        if PHASES & 2:
            batch = (first + (turn - 1) * step) * RANKS + rank
            if (turn > 0) & (batch < batches):
                failed |= reduce(
                    x, residual, rooms, own, batch, rows, width, at_pushed, at_gathered, at_partials, at_sums,
                    most_batches, stride, epoch, polls, state, MAPPED, RANKS, ADD, BATCH, BLOCK,
                )  # fmt: skip
        if PHASES & 4:
            for part in tl.static_range(RANKS):
                batch = first + ((turn - 2) * RANKS + part) * step
                if (turn > 1) & (batch < batches):
                    failed |= take(
                        out, residual, x, scale, own, batch, rows, width, at_gathered, at_sums, epoch, polls, state,
                        eps, MAPPED, ADD, NORM, BATCH, BLOCK,
                    )  # fmt: skip
    report(state, error, failed)
    if PHASES & 4:  # noqa: SIM102 (the first condition is a constant of the compiler)
        if is_last(state):
            tl.store(state + T_ARRIVED, 0)
            tl.store(state + T_EPOCH, epoch)


def launch_two_shot(
    room: ExchangeRoom,
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    programs: int = 0,
    phases: int = PUSH | REDUCE | TAKE,
) -> Tensor:
    """Launch the kernel: x [rows, width] contiguous, at most room.layout.rows rows -> `out` or a new tensor.

    Arguments and result are those of launch_one_shot.
    """
    layout, (rows, width) = room.layout, x.shape
    assert x.is_contiguous() and x.dtype is layout.dtype, "a contiguous partial in the room's dtype"
    assert width == layout.width and rows <= layout.rows and layout.has_large, "a partial that fits the room"
    out = result_of(x, residual, weight, out)
    block = triton.next_power_of_2(width)
    _, pushed, gathered, _, partials, sums = layout.offsets
    grid = min(triton.cdiv(rows, BATCH), programs or target().num_units)
    if rows:
        two_shot_kernel[(grid,)](
            out, x if residual is None else residual, x, x if weight is None else weight, room.addresses,
            room.addresses[room.rank], room.rank, room.error.data_ptr(), rows, width, pushed, gathered, partials, sums,
            layout.batches, layout.own_rows, room.polls, eps, RANKS=layout.ranks, ADD=residual is not None,
            NORM=weight is not None, PHASES=phases, BATCH=BATCH, MAPPED=room.mapped, BLOCK=block,
            num_warps=warps_of(block), **launch_options(),
        )  # fmt: skip
    return out
