"""The gated delta rule of a step replayed from each row's base (replay.py): the scan's kernels, then a kernel here.

Users: delta_rule with --deterministic. replay, convolution, prepare and carry compute all positions from the base on;
the last kernel normalises and gates the step's own tokens, and writes their columns into the tail.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.conv import launch_conv
from engine.kernels.state.delta import UNIT, DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_prepare import SIZE
from engine.kernels.state.delta_scan import launch_core
from engine.kernels.state.replay import copies_of, launch_replay, of_tail, replayed, steps_of, without_tail, write_tail
from engine.kernels.state.runs import row_of, sigmoid
from engine.kernels.target import tl, triton

HEADS = 8  # value heads of a program


@triton.jit(do_not_specialize=["num_rows"])
def delta_own_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM]
    made,  # [capacity, VALUE_HEADS * VALUE_DIM], before the norm
    projected, norm, pages,
    runs, tail_run, base, new_base, start, query_start, replay_start,
    num_rows,
    eps, runs_stride, projected_stride, page_stride,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, Z: tl.constexpr, SIGMOID: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, FEW_FIRST: tl.constexpr, FEW: tl.constexpr, INPUT_PAGE: tl.constexpr,
    INPUT_EACH: tl.constexpr, FEW_PAGE: tl.constexpr, FEW_EACH: tl.constexpr, RING: tl.constexpr,
    STEPS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,  # programs that normalise the heads of a token; further programs write the tail
    HEADS: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes HEADS value heads of one token, or writes COLUMNS columns of it into the tail."""
    grid_wait(OVERLAP)
    token, part = tl.program_id(0), tl.program_id(1)
    if token < tl.load(query_start + num_rows):
        row = row_of(token, query_start, num_rows, STEPS)
        if part < PARTS:
            position = tl.load(start + row) + token - tl.load(query_start + row)
            place = tl.load(replay_start + row) + position - tl.load(base + row)
            h, d = part * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_V)[None, :]
            lanes, column = (h < VALUE_HEADS) & (d < VALUE_DIM), h * VALUE_DIM + d
            width: tl.constexpr = VALUE_HEADS * VALUE_DIM
            o = tl.load(made + place.to(tl.int64) * width + column, mask=lanes, other=0.0).to(tl.float32)
            z = projected + token.to(tl.int64) * projected_stride + Z + column
            z = tl.load(z, mask=lanes, other=0.0).to(tl.float32)
            gain = tl.load(norm + d, mask=d < VALUE_DIM, other=0.0)
            o *= tl.rsqrt(tl.sum(o * o, 1) / VALUE_DIM + eps)[:, None] * gain
            o *= sigmoid(z) * (1.0 if SIGMOID else z)
            tl.store(out + token.to(tl.int64) * width + column, o.to(out.dtype.element_ty), mask=lanes)
        else:
            write_tail(
                token, row, part - PARTS, projected, pages, runs, tail_run, new_base, start, query_start, runs_stride,
                projected_stride, page_stride, FIRST, WIDTH, FEW_FIRST, FEW, INPUT_PAGE, INPUT_EACH, FEW_PAGE,
                FEW_EACH, RING, COLUMNS,
            )  # fmt: skip


def launch_delta_replay(
    projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta, out: Tensor
) -> None:
    """Writes the step's tokens into `out` [T, value_width]; tails and runs of `meta` are written."""
    assert not shape.per_channel, "rows with a gate per channel of keys are not scanned in chunks"
    ring, columns, (_, z, *_) = shape.ring, shape.tail_columns, shape.columns
    again, scanned, pages = replayed(meta, len(projected), ring, SIZE), replace(shape, ring=0), without_tail(cache)
    given = launch_replay(projected, columns, ring, cache, meta, again)
    active = launch_conv(
        given, weights.taps, None, pages, again, 0, (shape.key_width, 2 * shape.key_width), shape.key_heads,
        shape.key_dim, shape.value_dim, UNIT, short=False,
    )  # fmt: skip
    made = given.new_empty(len(given), shape.value_width)
    gates = shape.conv_width, shape.conv_width + shape.value_heads
    launch_core(active, given, weights, scanned, pages, again, made, gates=gates)
    views, rows = cache.pages.view(projected.dtype), len(meta.base)
    parts = triton.cdiv(shape.value_heads, HEADS)
    delta_own_kernel[len(projected), parts + copies_of(columns)](
        out, made, projected, weights.norm, views, meta.runs, meta.tail_run, meta.base, meta.new_base, meta.start,
        meta.query_start, again.query_start, rows, shape.eps, meta.runs.stride(0), projected.stride(0),
        views.stride(0), VALUE_HEADS=shape.value_heads, VALUE_DIM=shape.value_dim, Z=z, SIGMOID=shape.sigmoid,
        **of_tail(cache, columns, ring), STEPS=steps_of(rows), PARTS=parts, HEADS=HEADS,
        BLOCK_V=triton.next_power_of_2(shape.value_dim), num_warps=4, **launch_options(),
    )  # fmt: skip
