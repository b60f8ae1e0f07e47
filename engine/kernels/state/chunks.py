"""Lists the chunks of a step's long rows on the device, so that a launch in a CUDA graph reads each step's own list.

A chunk ends at a multiple of SIZE positions or at the end of the row's tokens in this step. The other chunks therefore
do not move when a prompt is cut elsewhere. Short rows have no chunks. The first layer that scans makes a step's list.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta, StateWork
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.runs import is_short
from engine.kernels.target import tl, triton


@triton.jit
def chunks_kernel(
    chunks,  # [capacity, 4]
    arrived,  # [1], zero before the launch
    base,
    start,
    query_start,
    checkpoint_run,
    RING: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program lists the chunks of one row, LANES chunks at a time."""
    grid_wait(OVERLAP)
    row = tl.program_id(0)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if count > 0:
        short = is_short(row, base, start, query_start, checkpoint_run, count > 0, RING)
        begin = tl.load(start + row)
        chunk = begin // SIZE
        number = tl.where(short, 0, (begin + count - 1) // SIZE + 1 - chunk)
        at = tl.atomic_add(arrived, number)
        for done in range(0, number, LANES):
            lane = done + tl.arange(0, LANES)
            left = tl.maximum((chunk + lane) * SIZE, begin)
            right = tl.minimum((chunk + lane + 1) * SIZE, begin + count)
            line, there = chunks + (at + lane) * 4, lane < number
            tl.store(line, row + tl.zeros([LANES], tl.int32), mask=there)
            tl.store(line + 1, first + left - begin, mask=there)
            tl.store(line + 2, right - left, mask=there)
            tl.store(line + 3, tl.zeros([LANES], tl.int32), mask=there)


def empty_work(max_rows: int, max_tokens: int, size: int, device: str | torch.device) -> StateWork:
    """Allocates a list with room for the chunks of any step of up to max_rows rows and max_tokens tokens."""
    capacity = max_tokens // size + 2 * min(max_rows, max_tokens)
    chunks = torch.zeros(capacity, 4, dtype=torch.int32, device=device)
    return StateWork(chunks, torch.zeros(1, dtype=torch.int32, device=device))


def fill_work(work: StateWork, meta: StateMeta, ring: int, size: int) -> None:
    """Writes the chunks of this step into `work`, on the device."""
    work.count.zero_()
    chunks_kernel[len(meta.base),](
        work.chunks, work.count, meta.base, meta.start, meta.query_start, meta.checkpoint_run, RING=ring, SIZE=size,
        LANES=64, num_warps=1, **launch_options(),
    )  # fmt: skip


def with_work(meta: StateMeta, tokens: int, ring: int, size: int) -> StateMeta:
    """Returns `meta` with the list of chunks; the step's first layer with this chunk size makes the list."""
    if meta.work is not None:
        return meta
    if size not in meta.works:
        work = meta.works[size] = empty_work(len(meta.base), tokens, size, meta.base.device)
        fill_work(work, meta, ring, size)
    return replace(meta, work=meta.works[size])


def chunks_reference(meta: StateMeta, ring: int, size: int) -> list[tuple[int, int, int]]:
    """Returns the chunks as (row, first token, number of tokens), in order."""
    found = []
    for row, (base, start) in enumerate(zip(meta.base.tolist(), meta.start.tolist())):
        first, last = meta.query_start[row : row + 2].tolist()
        end = start + last - first
        if first == last or (end - base <= ring and not meta.checkpoint_run[row, 0]):
            continue
        cuts = [start, *range(start // size * size + size, end, size), end]
        found += [(row, first + left - start, right - left) for left, right in itertools.pairwise(cuts)]
    return found


def listed(work: StateWork) -> list[tuple[int, int, int]]:
    """Returns the chunks that the kernel wrote, sorted, as chunks_reference returns them."""
    lines: Tensor = work.chunks[: int(work.count)]
    return sorted((row, token, count) for row, token, count, _ in lines.tolist())
