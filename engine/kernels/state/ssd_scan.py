"""Mamba-2 over prompts, in chunks of 64 positions: two Triton kernels.

With h the state before a chunk and G the sums of dt A within it:

    carry     Y = lower((C_i.B_j) e^{G_i - G_j}) dt x + e^G C h + D x;  h = e^{G_n} h + (e^{G_n - G} B)' dt x
    finish    gate and norm of a group of channels; the tail's x, B, dt and inputs

A program of `carry` computes BLOCK_P channels of a head: it folds the tail into the base, then computes the row's
chunks in order. Products take the model's dtype; sums and the state are float32. States are stored transposed, as in
delta_scan.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.chunks import with_work
from engine.kernels.state.delta import StatePages
from engine.kernels.state.folds import any_between, ends_of, exact_product, store_due, write_states
from engine.kernels.state.runs import decay_between, is_short, row_at, run_of, running_sum, softplus
from engine.kernels.state.ssd import SsdShape, SsdWeights
from engine.kernels.state.ssd_step import ORDERS, dims_of, gated_group, places_of
from engine.kernels.target import tl, triton

SIZE = 64  # positions of a chunk


@triton.jit
def ssd_carry_kernel(
    out,  # [T, HEADS * HEAD_DIM], before gate and norm
    active, projected, a_log, dt_bias, skip,
    states, again, steps,
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run, checkpoint_at,
    runs_stride, projected_stride, state_stride, again_stride, step_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, RING: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, AGAIN_FIRST: tl.constexpr, AGAIN_EACH: tl.constexpr,
    STEP_FIRST: tl.constexpr, STEP_EACH: tl.constexpr,
    TIMES: tl.constexpr,  # first column of dt in `projected`
    PLACES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, SIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_P channels of one head of one row, chunk by chunk in order."""
    grid_wait(OVERLAP)
    row, head = tl.program_id(2), tl.program_id(1)
    inner: tl.constexpr = HEADS * HEAD_DIM
    again_width: tl.constexpr = inner + GROUPS * STATE
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if (count > 0) & (is_short(row, base, start, query_start, checkpoint_run, count > 0, RING) == 0):
        behind, begin, group = tl.load(base + row), tl.load(start + row), head // (HEADS // GROUPS)
        n, p, j = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, PLACES)
        in_state, in_head = n < STATE, p < HEAD_DIM
        tail, base_blocks = (
            run_of(runs, tail_run, row, runs_stride, count > 0), run_of(runs, base_run, row, runs_stride, count > 0)
        )  # fmt: skip
        has = n < tl.where(behind > 0, STATE, 0)
        state_at = row_at(base_blocks, head * STATE + n, state_stride, has, STATE_FIRST, STATE_EACH, HEAD_DIM)
        state = tl.load(states + state_at[None, :] + p[:, None], mask=in_head[:, None] & has[None, :], other=0.0)
        state, rate = state.to(tl.float32), -tl.exp(tl.load(a_log + head))
        if RING > 0 and begin > behind:  # a replay begins at the base
            held, slot = j < begin - behind, (behind + j) % RING
            at = row_at(tail, slot, again_stride, held, AGAIN_FIRST, AGAIN_EACH, again_width)
            lanes = held[:, None] & in_state[None, :]
            past = tl.load(again + at[:, None] + inner + group * STATE + n[None, :], mask=lanes, other=0.0)
            lanes = in_head[:, None] & held[None, :]
            change = tl.load(again + at[None, :] + head * HEAD_DIM + p[:, None], mask=lanes, other=0.0).to(tl.float32)
            place = steps + row_at(tail, slot, step_stride, held, STEP_FIRST, STEP_EACH, HEADS) + head
            past_size = tl.load(place, mask=held, other=0.0)
            past_level = running_sum(rate * past_size, PLACES)
            change *= past_size[None, :]
            write_states(
                state, past, change, past_level, behind, begin, row, states, runs, write_run, new_base, checkpoint_run,
                checkpoint_at, head, p, runs_stride, state_stride, STATE, HEAD_DIM, STATE_FIRST, STATE_EACH, BLOCK_N,
                PLACES, True,
            )  # fmt: skip
            last = tl.sum(tl.where(j == begin - behind - 1, past_level, 0.0), 0)
            change *= decay_between(last, past_level, held)[None, :]
            state = state * tl.exp(last) + exact_product(change, past)
        i = tl.arange(0, SIZE)
        bias, direct = tl.load(dt_bias + head), tl.load(skip + head)
        kind = active.dtype.element_ty
        ends = ends_of(row, write_run, new_base, checkpoint_run, checkpoint_at)
        for chunk in range(begin // SIZE, (begin + count - 1) // SIZE + 1):
            left, right = tl.maximum(chunk * SIZE, begin), tl.minimum((chunk + 1) * SIZE, begin + count)
            there = i < right - left
            token = (first + left - begin + i).to(tl.int64)
            in_chunk = in_head[:, None] & there[None, :]
            line = active + token * (again_width + GROUPS * STATE)
            x = tl.load(line[None, :] + head * HEAD_DIM + p[:, None], mask=in_chunk, other=0.0).to(tl.float32)
            b_at = line[:, None] + inner + group * STATE + n[None, :]
            b = tl.load(b_at, mask=there[:, None] & in_state[None, :], other=0.0)
            c_at = line[None, :] + again_width + group * STATE + n[:, None]
            c = tl.load(c_at, mask=in_state[:, None] & there[None, :], other=0.0)
            dt = projected + token * projected_stride + TIMES + head
            size = softplus(tl.load(dt, mask=there, other=0.0).to(tl.float32) + bias)
            level = running_sum(tl.where(there, rate * size, 0.0), SIZE)
            u = x * size[None, :]
            mixed = tl.dot(b, c, input_precision="ieee")  # [j, i]
            mixed *= decay_between(level[None, :], level[:, None], i[:, None] <= i[None, :])
            y = tl.dot(state.to(kind), c, input_precision="ieee") * tl.exp(level)[None, :] + direct * x
            y += tl.dot(u.to(kind), mixed.to(kind), input_precision="ieee")
            place = out + (token * inner)[None, :] + head * HEAD_DIM + p[:, None]
            tl.store(place, y.to(out.dtype.element_ty), mask=in_chunk)
            if RING > 0 and any_between(ends, left, right):
                write_states(
                    state, b, u, level, left, right, row, states, runs, write_run, new_base, checkpoint_run,
                    checkpoint_at, head, p, runs_stride, state_stride, STATE, HEAD_DIM, STATE_FIRST, STATE_EACH,
                    BLOCK_N, SIZE, False,
                )  # fmt: skip
            total = tl.sum(tl.where(i == right - left - 1, level, 0.0), 0)
            u *= decay_between(total, level, there)[None, :]
            state = state * tl.exp(total) + tl.dot(u.to(kind), b, input_precision="ieee")
            if RING == 0:  # each state that a later step may start from is one of these
                state = store_due(
                    state, ends, left, right, row, states, runs, write_run, new_base, checkpoint_run, checkpoint_at,
                    head, p, runs_stride, state_stride, STATE, HEAD_DIM, STATE_FIRST, STATE_EACH, BLOCK_N,
                )  # fmt: skip


@triton.jit
def ssd_finish_kernel(
    out,  # [T, HEADS * HEAD_DIM], in place
    active, projected, dt_bias, norm, again, steps,
    runs, tail_run, new_base, start, query_start, chunks, num_chunks,
    eps, runs_stride, projected_stride, again_stride, step_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, ORDER: tl.constexpr,
    RING: tl.constexpr, AGAIN_FIRST: tl.constexpr, AGAIN_EACH: tl.constexpr, STEP_FIRST: tl.constexpr,
    STEP_EACH: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one chunk of one group of channels; group 0 also writes the tail's x, B, dt and inputs."""
    grid_wait(OVERLAP)
    number, group = tl.program_id(1), tl.program_id(0)
    inner: tl.constexpr = HEADS * HEAD_DIM
    width: tl.constexpr = inner // GROUPS
    again_width: tl.constexpr = inner + GROUPS * STATE
    conv_width: tl.constexpr = again_width + GROUPS * STATE
    if number < tl.load(num_chunks):
        row = tl.load(chunks + number * 4)
        token, count = tl.load(chunks + number * 4 + 1), tl.load(chunks + number * 4 + 2)
        lane, h = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H)
        gain = tl.zeros([BLOCK_G], tl.float32)
        if norm is not None:
            gain += tl.load(norm + group * width + lane, mask=lane < width, other=0.0)
        for each in range(count):
            at = (token + each).to(tl.int64)
            place = out + at * inner + group * width + lane
            y = tl.load(place, mask=lane < width, other=0.0).to(tl.float32)
            z = tl.load(projected + at * projected_stride + group * width + lane, mask=lane < width, other=0.0)
            y = gated_group(y, z.to(tl.float32), gain, eps, width, ORDER)
            tl.store(place, y.to(out.dtype.element_ty), mask=lane < width)
        if group == 0:
            first, begin = tl.load(query_start + row), tl.load(start + row)
            position = begin + token - first
            newest = tl.maximum(tl.load(new_base + row), begin + tl.load(query_start + row + 1) - first - RING)
            tail = run_of(runs, tail_run, row, runs_stride, count > 0)
            bias = tl.load(dt_bias + h, mask=h < HEADS, other=0.0)
            for one in range(tl.maximum(newest - position, 0), count):
                slot, at = (position + one) % RING, (token + one).to(tl.int64)
                line = projected + at * projected_stride + inner
                dt = tl.load(line + conv_width + h, mask=h < HEADS, other=0.0).to(tl.float32)
                put = steps + row_at(tail, slot, step_stride, one < count, STEP_FIRST, STEP_EACH, HEADS)
                tl.store(put + h, softplus(dt + bias), mask=h < HEADS)
                put_again = again + row_at(tail, slot, again_stride, one < count, AGAIN_FIRST, AGAIN_EACH, again_width)
                put_input = again + row_at(tail, slot, again_stride, one < count, INPUT_FIRST, INPUT_EACH, conv_width)
                for left in range(0, conv_width, COLUMNS):
                    column = left + tl.arange(0, COLUMNS)
                    found = tl.load(active + at * conv_width + column, mask=column < again_width, other=0.0)
                    tl.store(put_again + column, found, mask=column < again_width)
                    found = tl.load(line + column, mask=column < conv_width, other=0.0)
                    tl.store(put_input + column, found, mask=column < conv_width)


def launch_ssd_scan(
    active: Tensor,
    projected: Tensor,
    weights: SsdWeights,
    shape: SsdShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
) -> None:
    """Writes the tokens of long rows into `out` [T, inner]; `active`: the result of `launch_conv`."""
    meta = with_work(meta, len(active), shape.ring, SIZE)
    work, inputs = meta.work, cache.tail[2]
    assert work is not None
    launch_carry(active, projected, weights, shape, cache, meta, out, shape.columns[2])
    views, (runs_stride, *strides), found = places_of(cache, meta)
    names = ("AGAIN_FIRST", "AGAIN_EACH", "STEP_FIRST", "STEP_EACH")
    ssd_finish_kernel[shape.groups, len(work.chunks)](
        out, active, projected, weights.dt_bias, weights.norm, *views[1:], meta.runs, meta.tail_run, meta.new_base,
        meta.start, meta.query_start, work.chunks, work.count, shape.eps, runs_stride, projected.stride(0),
        *strides[1:], **dims_of(shape), ORDER=ORDERS[shape.norm], **{name: found[name] for name in names},
        INPUT_FIRST=inputs.first, INPUT_EACH=inputs.per_page,
        BLOCK_G=triton.next_power_of_2(shape.inner // shape.groups), BLOCK_H=triton.next_power_of_2(shape.heads),
        COLUMNS=1024, num_warps=4, **launch_options(),
    )  # fmt: skip


def launch_carry(
    active: Tensor,
    projected: Tensor,
    weights: SsdWeights,
    shape: SsdShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
    times: int,
) -> None:
    """Launches `carry`; `times`: the first column of dt in `projected`."""
    views, (runs_stride, *strides), found = places_of(cache, meta)
    block_n, most = (max(16, triton.next_power_of_2(size)) for size in (shape.state_size, shape.head_dim))
    block_p = min(16, most)
    ssd_carry_kernel[triton.cdiv(shape.head_dim, block_p), shape.heads, len(meta.base)](
        out, active, projected, weights.a_log, weights.dt_bias, weights.d, *views, meta.runs, meta.base_run,
        meta.write_run, meta.tail_run, meta.base, meta.new_base, meta.start, meta.query_start, meta.checkpoint_run,
        meta.checkpoint_at, runs_stride, projected.stride(0), *strides, **dims_of(shape), **found,
        TIMES=times, PLACES=max(16, triton.next_power_of_2(shape.ring)), BLOCK_N=block_n, BLOCK_P=block_p, SIZE=SIZE,
        num_warps=2, num_stages=1, **launch_options(),
    )  # fmt: skip
