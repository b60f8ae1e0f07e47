"""Mamba-2 of a step replayed from each row's base (replay.py): the scan's kernels, then a kernel here.

Users: ssd with --deterministic. replay, convolution and carry compute all positions from the base on; the last kernel
gates and normalises the step's own tokens, and writes their columns into the tail.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.conv import launch_conv
from engine.kernels.state.delta import StatePages
from engine.kernels.state.replay import copies_of, launch_replay, of_tail, replayed, steps_of, without_tail, write_tail
from engine.kernels.state.runs import row_of
from engine.kernels.state.ssd import SsdShape, SsdWeights
from engine.kernels.state.ssd_scan import SIZE, launch_carry
from engine.kernels.state.ssd_step import ORDERS, gated_group
from engine.kernels.target import tl, triton


@triton.jit(do_not_specialize=["num_rows"])
def ssd_own_kernel(
    out,  # [T, INNER]
    made,  # [capacity, INNER], before gate and norm
    projected, norm, pages,
    runs, tail_run, base, new_base, start, query_start, replay_start,
    num_rows,
    eps, runs_stride, projected_stride, page_stride,
    INNER: tl.constexpr, GROUPS: tl.constexpr, ORDER: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, FEW_FIRST: tl.constexpr, FEW: tl.constexpr, INPUT_PAGE: tl.constexpr,
    INPUT_EACH: tl.constexpr, FEW_PAGE: tl.constexpr, FEW_EACH: tl.constexpr, RING: tl.constexpr,
    STEPS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_G: tl.constexpr,  # power of two >= channels of a group
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one group of one token, or writes COLUMNS columns of it into the tail."""
    grid_wait(OVERLAP)
    token, group = tl.program_id(0), tl.program_id(1)
    if token < tl.load(query_start + num_rows):
        row = row_of(token, query_start, num_rows, STEPS)
        if group < GROUPS:
            position = tl.load(start + row) + token - tl.load(query_start + row)
            place = tl.load(replay_start + row) + position - tl.load(base + row)
            lane, width = tl.arange(0, BLOCK_G), INNER // GROUPS
            column, lanes = group * width + lane, lane < width
            gain = tl.zeros([BLOCK_G], tl.float32)
            if norm is not None:
                gain += tl.load(norm + column, mask=lanes, other=0.0)
            y = tl.load(made + place.to(tl.int64) * INNER + column, mask=lanes, other=0.0).to(tl.float32)
            z = tl.load(projected + token.to(tl.int64) * projected_stride + column, mask=lanes, other=0.0)
            y = gated_group(y, z.to(tl.float32), gain, eps, width, ORDER)
            tl.store(out + token.to(tl.int64) * INNER + column, y.to(out.dtype.element_ty), mask=lanes)
        else:
            write_tail(
                token, row, group - GROUPS, projected, pages, runs, tail_run, new_base, start, query_start,
                runs_stride, projected_stride, page_stride, FIRST, WIDTH, FEW_FIRST, FEW, INPUT_PAGE, INPUT_EACH,
                FEW_PAGE, FEW_EACH, RING, COLUMNS,
            )  # fmt: skip


def launch_ssd_replay(
    projected: Tensor, weights: SsdWeights, shape: SsdShape, cache: StatePages, meta: StateMeta, out: Tensor
) -> None:
    """Writes the step's tokens into `out` [T, inner]; tails and runs of `meta` are written."""
    ring, columns = shape.ring, shape.tail_columns
    again, scanned, pages = replayed(meta, len(projected), ring, SIZE), replace(shape, ring=0), without_tail(cache)
    given = launch_replay(projected, columns, ring, cache, meta, again)
    active = launch_conv(given, weights.taps, weights.bias, pages, again, 0, short=False)
    made = given.new_empty(len(given), shape.inner)
    launch_carry(active, given, weights, scanned, pages, again, made, times=shape.conv_width)
    views, rows = cache.pages.view(projected.dtype), len(meta.base)
    ssd_own_kernel[len(projected), shape.groups + copies_of(columns)](
        out, made, projected, weights.norm, views, meta.runs, meta.tail_run, meta.base, meta.new_base, meta.start,
        meta.query_start, again.query_start, rows, shape.eps, meta.runs.stride(0), projected.stride(0),
        views.stride(0), INNER=shape.inner, GROUPS=shape.groups, ORDER=ORDERS[shape.norm],
        **of_tail(cache, columns, ring), STEPS=steps_of(rows),
        BLOCK_G=triton.next_power_of_2(shape.inner // shape.groups), num_warps=4, **launch_options(),
    )  # fmt: skip
