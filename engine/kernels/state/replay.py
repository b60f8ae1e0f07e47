"""Rows of a step replayed from their base, so that no bit of a result depends on how positions were cut into steps.

Users: --deterministic on an accelerator (delta_replay, ssd_replay). A base is a multiple of a scan's chunk. The tail
holds the products' columns of each position after the base, not terms computed from them; a step computes all
positions from the base on with the kernels that scan prompts, and returns its own:

    base ............... start ......... end            replayed  [positions from each row's base on, columns]
      | from the tail      | from this step |           rows      replay_start[row]..replay_start[row + 1] - 1

Row i of a chunk's products depends on rows 0..i only, because later rows are multiplied by zeros. So a position's
result depends on the positions before it, and on nothing else: not on the step that computes it, its neighbours, or the
base, which may be any earlier multiple of the chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.chunks import empty_work, fill_work
from engine.kernels.state.delta import StatePages
from engine.kernels.state.places import Columns
from engine.kernels.state.rows import step_rows
from engine.kernels.state.runs import row_at, row_of
from engine.kernels.target import tl, triton

COLUMNS = 1024  # columns that a program copies
POSITIONS = 8


@triton.jit
def column_places(
    line, tail, slot, pages, column, there, page_stride, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    FEW_FIRST: tl.constexpr, INPUT_PAGE: tl.constexpr, INPUT_EACH: tl.constexpr, FEW_PAGE: tl.constexpr,
    FEW_EACH: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Addresses of columns of a tail's position: in its line of the product, and in the ring."""
    wide = column < WIDTH
    source = line + tl.where(wide, FIRST + column, FEW_FIRST + column - WIDTH)
    inputs = row_at(tail, slot, page_stride, there, INPUT_PAGE, INPUT_EACH, WIDTH)
    few = row_at(tail, slot, page_stride, there, FEW_PAGE, FEW_EACH, FEW)
    return source, pages + tl.where(wide, inputs + column, few + column - WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def replay_kernel(
    given,  # [capacity, WIDTH + FEW]
    projected,  # [T, ...]
    pages, runs, tail_run, base, start, query_start, replay_start,
    num_rows,
    runs_stride, projected_stride, page_stride,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, FEW_FIRST: tl.constexpr, FEW: tl.constexpr, INPUT_PAGE: tl.constexpr,
    INPUT_EACH: tl.constexpr, FEW_PAGE: tl.constexpr, FEW_EACH: tl.constexpr, RING: tl.constexpr,
    STEPS: tl.constexpr,  # 2 ** STEPS >= num_rows
    POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program copies COLUMNS columns of POSITIONS replayed positions."""
    grid_wait(OVERLAP)
    first, count = tl.program_id(0) * POSITIONS, tl.load(replay_start + num_rows)
    if first < count:
        place = first + tl.arange(0, POSITIONS)
        there = place < count
        row = row_of(place, replay_start, num_rows, STEPS)
        begin = tl.load(start + row, mask=there, other=0)
        position = tl.load(base + row, mask=there, other=0) + place - tl.load(replay_start + row, mask=there, other=0)
        token = tl.load(query_start + row, mask=there, other=0) + position - begin
        line = projected + token.to(tl.int64) * projected_stride
        tail = runs + tl.load(tail_run + row, mask=there, other=0).to(tl.int64) * runs_stride
        column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        source, stored = column_places(
            line[:, None], tail[:, None], (position % RING)[:, None], pages, column, there[:, None], page_stride, FIRST,
            WIDTH, FEW_FIRST, INPUT_PAGE, INPUT_EACH, FEW_PAGE, FEW_EACH, FEW,
        )  # fmt: skip
        inside = there[:, None] & (column < WIDTH + FEW)
        found = tl.load(tl.where((position >= begin)[:, None], source, stored), mask=inside, other=0.0)
        tl.store(given + place.to(tl.int64)[:, None] * (WIDTH + FEW) + column, found, mask=inside)


@triton.jit
def write_tail(
    token, row, part, projected, pages, runs, tail_run, new_base, start, query_start, runs_stride, projected_stride,
    page_stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, FEW_FIRST: tl.constexpr, FEW: tl.constexpr,
    INPUT_PAGE: tl.constexpr, INPUT_EACH: tl.constexpr, FEW_PAGE: tl.constexpr, FEW_EACH: tl.constexpr,
    RING: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes a part of a token's columns into the ring, if the token is among the newest."""
    first = tl.load(query_start + row)
    begin = tl.load(start + row)
    end, position = begin + tl.load(query_start + row + 1) - first, begin + token - first
    if position >= tl.maximum(tl.load(new_base + row), end - RING):
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        line = projected + token.to(tl.int64) * projected_stride
        tail = runs + tl.load(tail_run + row).to(tl.int64) * runs_stride
        source, stored = column_places(
            line, tail, position % RING, pages, column, token >= 0, page_stride, FIRST, WIDTH, FEW_FIRST, INPUT_PAGE,
            INPUT_EACH, FEW_PAGE, FEW_EACH, FEW,
        )  # fmt: skip
        inside = column < WIDTH + FEW
        tl.store(stored, tl.load(source, mask=inside, other=0.0), mask=inside)


def replayed(meta: StateMeta, tokens: int, ring: int, size: int) -> StateMeta:
    """Returns the step in which each row starts at its base, with its list of chunks of `size` positions.

    The step's first layer makes the list. `tokens`: of the batch; `ring`: positions that a tail holds.
    """
    if size not in meta.works:
        count = meta.query_start.diff()
        lens = torch.where(count > 0, meta.start + count - meta.base, 0).cumsum(0)
        query_start = torch.cat([lens.new_zeros(1), lens]).int()
        work = empty_work(len(meta.base), capacity_of(meta, tokens, ring), size, meta.base.device)
        fill_work(work, replace(meta, start=meta.base, query_start=query_start), 0, size)
        meta.works[size] = replace(work, query_start=query_start)
    work = meta.works[size]
    assert work.query_start is not None, "one engine scans either from a row's start or from its base"
    return replace(meta, start=meta.base, query_start=work.query_start, work=work, decode_only=False)


def capacity_of(meta: StateMeta, tokens: int, ring: int) -> int:
    """The most positions of a replay; a multiple of 16, so that launches of all steps are compiled alike."""
    return -(-(tokens + len(meta.base) * (ring - 1)) // 16) * 16


def without_tail(cache: StatePages) -> StatePages:
    """The same pages for kernels of a scan, which need no tail's places if rows start at their base."""
    return StatePages(cache.pages, cache.state, (cache.state[0], cache.state[0], cache.state[0], cache.tail[-1]))


def of_tail(cache: StatePages, columns: Columns, ring: int) -> dict[str, Any]:
    """Constants that the kernels of a replay share."""
    few, inputs = cache.tail
    places = {"INPUT_PAGE": inputs.first, "INPUT_EACH": inputs.per_page, "FEW_PAGE": few.first}
    taken = {"FIRST": columns.first, "WIDTH": columns.width, "FEW_FIRST": columns.few_first, "FEW": columns.few}
    return {**taken, **places, "FEW_EACH": few.per_page, "RING": ring, "COLUMNS": COLUMNS}


def copies_of(columns: Columns) -> int:
    """Programs that copy the columns of a position."""
    return triton.cdiv(columns.width + columns.few, COLUMNS)


def steps_of(rows: int) -> int:
    """Steps of a bisection among rows."""
    return max(1, (rows - 1).bit_length())


def launch_replay(
    projected: Tensor, columns: Columns, ring: int, cache: StatePages, meta: StateMeta, again: StateMeta
) -> Tensor:
    """Returns the columns of all replayed positions [capacity, width + few]; `again`: the result of `replayed`."""
    pages, rows = cache.pages.view(projected.dtype), len(meta.base)
    assert cache.tail[0].dtype is cache.tail[1].dtype is projected.dtype, f"{projected.dtype} and another tail"
    assert projected.stride(1) == 1
    capacity = capacity_of(meta, len(projected), ring)
    given = projected.new_empty(capacity, columns.width + columns.few)
    replay_kernel[triton.cdiv(capacity, POSITIONS), copies_of(columns)](
        given, projected, pages, meta.runs, meta.tail_run, meta.base, meta.start, meta.query_start, again.query_start,
        rows, meta.runs.stride(0), projected.stride(0), pages.stride(0), **of_tail(cache, columns, ring),
        STEPS=steps_of(rows), POSITIONS=POSITIONS, num_warps=4, **launch_options(),
    )  # fmt: skip
    return given


def replay_reference(projected: Tensor, columns: Columns, ring: int, cache: StatePages, meta: StateMeta) -> Tensor:
    found = []
    for row in step_rows(meta):
        few, inputs = (row.read_tail(cache.pages, place, ring) for place in cache.tail)
        own = projected[row.tokens]
        wide = own[:, columns.first : columns.first + columns.width]
        small = own[:, columns.few_first : columns.few_first + columns.few]
        found.append(torch.cat([torch.cat([inputs, few], 1), torch.cat([wide, small], 1)]))
    given = projected.new_zeros(capacity_of(meta, len(projected), ring), columns.width + columns.few)
    made = torch.cat(found)
    given[: len(made)] = made
    return given
