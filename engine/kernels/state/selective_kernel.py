"""Mamba-1's recurrence, position by position from the base: two Triton kernels, the second only for long rows.

A program of selective_kernel computes BLOCK_D channels of one row, with their states in registers. It replays the
tail's positions, then computes the step's. For short rows it writes `steps` and B into the tail; conv has written x and
inputs. For long rows it writes x, `steps` and inputs of its own channels after it has read them. All programs of a
row read B, so `tail_kernel` writes B after all of them have ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import StatePages
from engine.kernels.state.runs import CHECKPOINTS, is_short, row_at, run_of, sigmoid, softplus
from engine.kernels.state.selective import SelectiveInputs, SelectiveShape, SelectiveWeights
from engine.kernels.target import tl, triton

BLOCK_D = 64  # channels that one program computes
EVERY = 16  # divides each base of an accelerator


@triton.jit
def load_wide(pointer, mask):
    """Loads as float32, 0 where masked."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def selective_kernel(
    out,  # [T, INNER]
    x, steps,  # [T, INNER]
    b, c,  # [T, STATE], rows mixed_stride apart
    z, inputs,  # [T, INNER], rows projected_stride apart
    a_log, dt_bias, skip,
    states, pages,
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run, checkpoint_at,
    runs_stride, mixed_stride, projected_stride, state_stride, page_stride,
    INNER: tl.constexpr, STATE: tl.constexpr, RING: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, X_FIRST: tl.constexpr, X_EACH: tl.constexpr,
    STEP_FIRST: tl.constexpr, B_FIRST: tl.constexpr, B_EACH: tl.constexpr, INPUT_FIRST: tl.constexpr,
    EVERY: tl.constexpr,  # positions after which a state is rounded as a base is; 0: never
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_D channels of one row."""
    grid_wait(OVERLAP)
    row = tl.program_id(1)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if count > 0:
        short = is_short(row, base, start, query_start, checkpoint_run, count > 0, RING)
        d, n = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        inside, in_state, b_lanes = d < INNER, n < STATE, tl.where(tl.program_id(0) == 0, STATE, 0)
        whole = inside[:, None] & in_state[None, :]
        behind, begin = tl.load(base + row), tl.load(start + row)
        end = begin + count
        newest = tl.where(short, begin, tl.maximum(tl.load(new_base + row), end - RING))
        tail, base_blocks = (
            run_of(runs, tail_run, row, runs_stride, count > 0), run_of(runs, base_run, row, runs_stride, count > 0)
        )  # fmt: skip
        has = d < tl.where(behind > 0, INNER, 0)
        state_at = row_at(base_blocks, d, state_stride, has, STATE_FIRST, STATE_EACH, STATE)
        state = load_wide(states + state_at[:, None] + n[None, :], has[:, None] & in_state[None, :])
        rate = -tl.exp(tl.load(a_log + d[:, None] * STATE + n[None, :], mask=whole, other=0.0))
        bias, direct = load_wide(dt_bias + d, inside), load_wide(skip + d, inside)
        targets = row * CHECKPOINTS + tl.arange(0, CHECKPOINTS)
        marked = tl.where(tl.load(checkpoint_run + targets) > 0, tl.load(checkpoint_at + targets), 0)
        written = tl.where(tl.load(write_run + row) > 0, tl.load(new_base + row), 0)
        for position in range(behind, end):
            slot = position % RING
            at = row_at(tail, slot, page_stride, count > 0, X_FIRST, X_EACH, INNER) + d
            step_at = row_at(tail, slot, page_stride, count > 0, STEP_FIRST, X_EACH, INNER) + d
            b_at = row_at(tail, slot, page_stride, count > 0, B_FIRST, B_EACH, STATE) + n
            token = (first + position - begin).to(tl.int64)
            if position < begin:
                own, size = load_wide(pages + at, inside), load_wide(pages + step_at, inside)
                taken = load_wide(pages + b_at, in_state)
            else:
                own, size = load_wide(x + token * INNER + d, inside), load_wide(steps + token * INNER + d, inside)
                taken = load_wide(b + token * mixed_stride + n, in_state)
            dt = softplus(size + bias)
            state = tl.exp(dt[:, None] * rate) * state + (dt * own)[:, None] * taken[None, :]
            if position >= begin:
                read = load_wide(c + token * mixed_stride + n, in_state)
                y = tl.sum(state * read[None, :], 1) + direct * own
                gate = load_wide(z + token * projected_stride + d, inside)
                tl.store(out + token * INNER + d, (y * gate * sigmoid(gate)).to(out.dtype.element_ty), mask=inside)
                if position >= newest:
                    kind = pages.dtype.element_ty
                    tl.store(pages + step_at, size.to(kind), mask=inside)
                    if short:
                        tl.store(pages + b_at, taken.to(kind), mask=n < b_lanes)
                    else:
                        tl.store(pages + at, own.to(kind), mask=inside)
                        given = tl.load(inputs + token * projected_stride + d, mask=inside, other=0.0)
                        put = row_at(tail, slot, page_stride, count > 0, INPUT_FIRST, X_EACH, INNER) + d
                        tl.store(pages + put, given, mask=inside)
            if (position + 1 == written) | (tl.sum((marked == position + 1).to(tl.int32), 0) > 0):
                for number in range(CHECKPOINTS + 1):
                    if number == CHECKPOINTS:
                        run, ends = tl.load(write_run + row), tl.load(new_base + row)
                    else:
                        run = tl.load(checkpoint_run + row * CHECKPOINTS + number)
                        ends = tl.load(checkpoint_at + row * CHECKPOINTS + number)
                    if (run > 0) & (ends == position + 1):
                        blocks = runs + run.to(tl.int64) * runs_stride
                        put_at = row_at(blocks, d, state_stride, inside, STATE_FIRST, STATE_EACH, STATE)
                        place = states + put_at[:, None] + n[None, :]
                        tl.store(place, state.to(states.dtype.element_ty), mask=whole)
            if EVERY > 0:
                rounded = state.to(states.dtype.element_ty).to(tl.float32)
                state = tl.where((position + 1) % EVERY == 0, rounded, state)


@triton.jit
def tail_kernel(
    b,  # [T, STATE], rows mixed_stride apart
    pages, runs, tail_run, base, new_base, start, query_start, checkpoint_run,
    runs_stride, mixed_stride, page_stride,
    STATE: tl.constexpr, RING: tl.constexpr, B_FIRST: tl.constexpr, B_EACH: tl.constexpr, BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program writes B of the newest positions of one long row into the tail."""
    grid_wait(OVERLAP)
    row, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if (count > 0) & (is_short(row, base, start, query_start, checkpoint_run, count > 0, RING) == 0):
        begin, tail = tl.load(start + row), run_of(runs, tail_run, row, runs_stride, count > 0)
        newest = tl.maximum(tl.maximum(tl.load(new_base + row), begin + count - RING), begin)
        for position in range(newest, begin + count):
            token = (first + position - begin).to(tl.int64)
            found = tl.load(b + token * mixed_stride + n, mask=n < STATE, other=0.0)
            at = row_at(tail, position % RING, page_stride, count > 0, B_FIRST, B_EACH, STATE)
            tl.store(pages + at + n, found, mask=n < STATE)


def launch_selective(
    given: SelectiveInputs,
    inputs: Tensor,
    weights: SelectiveWeights,
    shape: SelectiveShape,
    cache: StatePages,
    meta: StateMeta,
) -> Tensor:
    """Returns a new [T, inner]; `inputs` [T, inner]: the convolution's, with the row stride of z."""
    (state_part, _), (x, steps, b, taps) = cache.state, cache.tail
    states, pages, out = cache.pages.view(state_part.dtype), cache.pages.view(x.dtype), torch.empty_like(given.x)
    assert given.x.stride() == given.steps.stride() == (shape.inner, 1), "x and steps have rows without gaps"
    assert given.b.stride() == given.c.stride(), "B and C lie in one product"
    assert inputs.stride() == given.z.stride(), "x and z lie in one product"
    assert given.b.stride(1) == inputs.stride(1) == 1, "numbers of a row are neighbours"
    assert x.per_page == steps.per_page == taps.per_page, "parts as wide as the layer"
    rows, block_n = len(meta.base), triton.next_power_of_2(shape.state_size)
    places = {"B_FIRST": b.first, "B_EACH": b.per_page, "BLOCK_N": block_n}
    selective_kernel[triton.cdiv(shape.inner, BLOCK_D), rows](
        out, given.x, given.steps, given.b, given.c, given.z, inputs, weights.a_log, weights.dt_bias, weights.d, states,
        pages, meta.runs, meta.base_run, meta.write_run, meta.tail_run, meta.base, meta.new_base, meta.start,
        meta.query_start, meta.checkpoint_run, meta.checkpoint_at, meta.runs.stride(0), given.b.stride(0),
        given.z.stride(0), states.stride(0), pages.stride(0), INNER=shape.inner, STATE=shape.state_size,
        RING=shape.ring, STATE_FIRST=state_part.first, STATE_EACH=state_part.per_page, X_FIRST=x.first,
        X_EACH=x.per_page, STEP_FIRST=steps.first, INPUT_FIRST=taps.first, EVERY=EVERY * shape.exact, BLOCK_D=BLOCK_D,
        **places, num_warps=4,
        **launch_options(),
    )  # fmt: skip
    if not meta.decode_only:
        tail_kernel[rows,](
            given.b, pages, meta.runs, meta.tail_run, meta.base, meta.new_base, meta.start, meta.query_start,
            meta.checkpoint_run, meta.runs.stride(0), given.b.stride(0), pages.stride(0), STATE=shape.state_size,
            RING=shape.ring, **places, num_warps=1, **launch_options(),
        )  # fmt: skip
    return out
