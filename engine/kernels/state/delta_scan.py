"""The gated delta rule over prompts, in chunks of 64 positions: three Triton kernels.

With S the state before a chunk, G the sums of its gates and A = strictly lower(beta_i (k_i.k_j) e^{G_i - G_j}):

    prepare   X = (I + A)^-1 by blocks of 16, in float32;  M = lower((q_i.k_j) e^{G_i - G_j})      chunks in parallel
    carry     U = X beta (V - e^G K S);  O = e^G Q S + M U;  S = e^{G_n} S + (e^{G_n - G} K)' U     chunks in order
    finish    the gated norm; the tail's keys, gates and inputs                                   tokens in parallel

`carry` first folds the tail into the base; a replay (replay.py) has no tail, RING is 0, and its states are due at ends
of chunks. Otherwise a state that is due within a chunk is written without ending the chunk, so u of a position does not
depend on where states are written. Products take the model's dtype; sums and the state are float32. Products have
columns of the state as rows, 32 at a time: too few rows for the matrix instructions of four warps (sm_90), because some
versions of Triton compile these instructions wrongly in such kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.chunks import with_work
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_inputs import gate_of
from engine.kernels.state.delta_prepare import SIZE, launch_prepare
from engine.kernels.state.delta_step import places_of
from engine.kernels.state.folds import any_between, ends_of, exact_product, store_due, write_states
from engine.kernels.state.runs import decay_between, is_short, row_at, run_of, running_sum, sigmoid
from engine.kernels.target import target, tl, triton


@triton.jit
def delta_carry_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM], before the norm
    inverse, mixed, levels, betas, active,
    states, keys, deltas, gates,
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run, checkpoint_at,
    level_stride, runs_stride, state_stride, key_stride, delta_stride, gate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr,
    DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr,
    PLACES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_V columns of one value head of one row, chunk by chunk in order."""
    grid_wait(OVERLAP)
    row, head = tl.program_id(2), tl.program_id(1)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if (count > 0) & (is_short(row, base, start, query_start, checkpoint_run, count > 0, RING) == 0):
        behind, begin = tl.load(base + row), tl.load(start + row)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        c, d = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_key, in_value = c < KEY_DIM, d < VALUE_DIM
        tail = runs + tl.load(tail_run + row).to(tl.int64) * runs_stride
        base_blocks = runs + tl.load(base_run + row).to(tl.int64) * runs_stride
        has = c < tl.where(behind > 0, KEY_DIM, 0)
        state_at = row_at(base_blocks, head * KEY_DIM + c, state_stride, has, STATE_FIRST, STATE_EACH, VALUE_DIM)
        state = tl.load(states + state_at[None, :] + d[:, None], mask=has[None, :] & in_value[:, None], other=0.0)
        state = state.to(tl.float32)
        if RING > 0 and begin > behind:  # a replay begins at the base
            j = tl.arange(0, PLACES)
            held, slot = j < begin - behind, (behind + j) % RING
            at = row_at(tail, slot, key_stride, held, KEY_FIRST, KEY_EACH, KEY_HEADS * KEY_DIM) + key_head * KEY_DIM
            past = tl.load(keys + at[:, None] + c[None, :], mask=held[:, None] & in_key[None, :], other=0.0)
            at = row_at(tail, slot * VALUE_HEADS + head, delta_stride, held, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
            lanes = in_value[:, None] & held[None, :]
            change = tl.load(deltas + at[None, :] + d[:, None], mask=lanes, other=0.0).to(tl.float32)
            at = row_at(tail, slot, gate_stride, held, GATE_FIRST, GATE_EACH, VALUE_HEADS) + head
            past_level = running_sum(tl.load(gates + at, mask=held, other=0.0), PLACES)
            write_states(
                state, past, change, past_level, behind, begin, row, states, runs, write_run, new_base, checkpoint_run,
                checkpoint_at, head, d, runs_stride, state_stride, KEY_DIM, VALUE_DIM, STATE_FIRST, STATE_EACH, BLOCK_K,
                PLACES, True,
            )  # fmt: skip
            last = tl.sum(tl.where(j == begin - behind - 1, past_level, 0.0), 0)
            change *= decay_between(last, past_level, held)[None, :]
            state = state * tl.exp(last) + exact_product(change, past)
        i = tl.arange(0, SIZE)
        width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        kind = active.dtype.element_ty
        newest = tl.maximum(tl.load(new_base + row), begin + count - RING)  # first position that goes into the tail
        ends = ends_of(row, write_run, new_base, checkpoint_run, checkpoint_at)
        for chunk in tl.range(begin // SIZE, (begin + count - 1) // SIZE + 1, num_stages=STAGES):
            left = tl.maximum(chunk * SIZE, begin)
            right = tl.minimum((chunk + 1) * SIZE, begin + count)
            there, token = i < right - left, (first + left - begin + i).to(tl.int64)
            in_chunk = in_value[:, None] & there[None, :]
            line = active + token * width
            q_at = line[None, :] + key_head * KEY_DIM + c[:, None]
            q = tl.load(q_at, mask=in_key[:, None] & there[None, :], other=0.0)
            k_at = line[:, None] + (KEY_HEADS + key_head) * KEY_DIM + c[None, :]
            k = tl.load(k_at, mask=there[:, None] & in_key[None, :], other=0.0)
            v_at = line[None, :] + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + d[:, None]
            v = tl.load(v_at, mask=in_chunk, other=0.0)
            square = ((token * VALUE_HEADS + head) * SIZE)[None, :] + i[:, None]  # [j, i]
            x = tl.load(inverse + square, mask=there[None, :], other=0.0)
            m = tl.load(mixed + square, mask=there[None, :], other=0.0)
            level = tl.load(levels + head * level_stride + token, mask=there, other=0.0)
            beta = tl.load(betas + head * level_stride + token, mask=there, other=0.0)
            turned = tl.load(q_at + KEY_HEADS * KEY_DIM, mask=in_key[:, None] & there[None, :], other=0.0)
            known = state.to(kind)
            u = tl.dot(known, turned, input_precision="ieee") * tl.exp(level)[None, :]
            u = (v.to(tl.float32) - u) * beta[None, :]
            u = tl.dot(u.to(kind), x, input_precision="ieee")
            u = tl.where(in_chunk, u, 0.0)
            o = tl.dot(known, q, input_precision="ieee") * tl.exp(level)[None, :]
            o += tl.dot(u.to(kind), m, input_precision="ieee")
            place = out + (token * (VALUE_HEADS * VALUE_DIM))[None, :] + head * VALUE_DIM + d[:, None]
            tl.store(place, o.to(out.dtype.element_ty), mask=in_chunk)
            if RING > 0 and any_between(ends, left, right):
                write_states(
                    state, k, u, level, left, right, row, states, runs, write_run, new_base, checkpoint_run,
                    checkpoint_at, head, d, runs_stride, state_stride, KEY_DIM, VALUE_DIM, STATE_FIRST, STATE_EACH,
                    BLOCK_K, SIZE, False,
                )  # fmt: skip
            if RING > 0 and right > newest:
                position = left + i
                kept_lanes = there & (position >= newest)
                slots = position % RING * VALUE_HEADS + head
                put = row_at(tail, slots, delta_stride, kept_lanes, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
                lanes = in_value[:, None] & kept_lanes[None, :]
                tl.store(deltas + put[None, :] + d[:, None], u.to(deltas.dtype.element_ty), mask=lanes)
            total = tl.sum(tl.where(i == right - left - 1, level, 0.0), 0)
            u *= decay_between(total, level, there)[None, :]
            state = state * tl.exp(total) + tl.dot(u.to(kind), k, input_precision="ieee")
            if RING == 0:  # each state that a later step may start from is one of these
                state = store_due(
                    state, ends, left, right, row, states, runs, write_run, new_base, checkpoint_run, checkpoint_at,
                    head, d, runs_stride, state_stride, KEY_DIM, VALUE_DIM, STATE_FIRST, STATE_EACH, BLOCK_K,
                )  # fmt: skip


@triton.jit
def delta_finish_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM], in place
    active, projected, a_log, dt_bias, norm,
    keys, gates,  # views of the pages: in the model's dtype, and in the dtype of the gates
    runs, tail_run, base, new_base, start, query_start, checkpoint_run, chunks, num_chunks,
    eps, runs_stride, projected_stride, key_stride, gate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    Z: tl.constexpr, A: tl.constexpr, SIGMOID: tl.constexpr, RING: tl.constexpr,
    KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr,
    INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one chunk of one value head; head 0 also writes the tail's keys, gates and inputs."""
    grid_wait(OVERLAP)
    number, head = tl.program_id(1), tl.program_id(0)
    if number < tl.load(num_chunks):
        row = tl.load(chunks + number * 4)
        token, count = tl.load(chunks + number * 4 + 1), tl.load(chunks + number * 4 + 2)
        i, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK_V)
        gain = tl.load(norm + d, mask=d < VALUE_DIM, other=0.0)[None, :]
        for begin in range(0, count, TOKENS):
            lanes = ((begin + i) < count)[:, None] & (d < VALUE_DIM)[None, :]
            line = (token + begin + i).to(tl.int64)[:, None]
            place = out + line * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + d[None, :]
            o = tl.load(place, mask=lanes, other=0.0).to(tl.float32)
            z = projected + line * projected_stride + Z + head * VALUE_DIM + d[None, :]
            z = tl.load(z, mask=lanes, other=0.0).to(tl.float32)
            o *= tl.rsqrt(tl.sum(o * o, 1) / VALUE_DIM + eps)[:, None] * gain
            o *= sigmoid(z) * (1.0 if SIGMOID else z)
            tl.store(place, o.to(out.dtype.element_ty), mask=lanes)
        if head == 0:
            first = tl.load(query_start + row)
            end = tl.load(start + row) + tl.load(query_start + row + 1) - first
            position = tl.load(start + row) + token - first
            newest = tl.maximum(tl.load(new_base + row), end - RING)
            tail = run_of(runs, tail_run, row, runs_stride, count > 0)
            h = tl.arange(0, BLOCK_H)
            speed = tl.load(a_log + h, mask=h < VALUE_HEADS, other=0.0)
            bias = tl.load(dt_bias + h, mask=h < VALUE_HEADS, other=0.0)
            for each in range(tl.maximum(newest - position, 0), count):
                slot, line = (position + each) % RING, (token + each).to(tl.int64)
                a = tl.load(projected + line * projected_stride + A + h, mask=h < VALUE_HEADS, other=0.0)
                at = row_at(tail, slot, gate_stride, each < count, GATE_FIRST, GATE_EACH, VALUE_HEADS)
                tl.store(gates + at + h, gate_of(a, speed, bias), mask=h < VALUE_HEADS)
                key_width: tl.constexpr = KEY_HEADS * KEY_DIM
                width: tl.constexpr = 2 * key_width + VALUE_HEADS * VALUE_DIM
                put = keys + row_at(tail, slot, key_stride, each < count, KEY_FIRST, KEY_EACH, key_width)
                for left in range(0, key_width, COLUMNS):
                    column = left + tl.arange(0, COLUMNS)
                    found = tl.load(active + line * width + key_width + column, mask=column < key_width, other=0.0)
                    tl.store(put + column, found, mask=column < key_width)
                put = keys + row_at(tail, slot, key_stride, each < count, INPUT_FIRST, INPUT_EACH, width)
                for left in range(0, width, COLUMNS):
                    column = left + tl.arange(0, COLUMNS)
                    found = tl.load(projected + line * projected_stride + column, mask=column < width, other=0.0)
                    tl.store(put + column, found, mask=column < width)


def launch_delta_scan(
    active: Tensor,
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
    tuning: dict[str, Any] | None = None,
) -> None:
    """Writes the tokens of long rows into `out` [T, value_width]; `active`: the result of `launch_conv`."""
    meta = with_work(meta, len(active), shape.ring, SIZE)
    launch_core(active, projected, weights, shape, cache, meta, out, tuning)
    views, (runs_stride, _, key_stride, _, gate_stride), found = places_of(cache, meta)
    (inputs, work), (_, z, _, a, _) = (cache.tail[3], meta.work), shape.columns
    assert work is not None
    names = ("KEY_FIRST", "KEY_EACH", "GATE_FIRST", "GATE_EACH")
    block_v = triton.next_power_of_2(shape.value_dim)
    delta_finish_kernel[shape.value_heads, len(work.chunks)](
        out, active, projected, weights.a_log, weights.dt_bias, weights.norm, views[1], views[3], meta.runs,
        meta.tail_run, meta.base, meta.new_base, meta.start, meta.query_start, meta.checkpoint_run, work.chunks,
        work.count, shape.eps, runs_stride, projected.stride(0), key_stride, gate_stride, KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, Z=z, A=a,
        SIGMOID=shape.sigmoid, RING=shape.ring, **{name: found[name] for name in names}, INPUT_FIRST=inputs.first,
        INPUT_EACH=inputs.per_page, TOKENS=16, BLOCK_V=block_v, BLOCK_H=triton.next_power_of_2(shape.value_heads),
        COLUMNS=1024, num_warps=4, **launch_options(),
    )  # fmt: skip


def launch_core(
    active: Tensor,
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
    tuning: dict[str, Any] | None = None,
    gates: tuple[int, int] | None = None,
) -> None:
    """Launches `prepare` and `carry`; `meta` has the list of chunks. `gates`: see launch_prepare."""
    views, (runs_stride, *strides), found = places_of(cache, meta)
    work, heads = meta.work, shape.value_heads
    assert work is not None
    assert not shape.per_channel, "rows with a gate per channel are not scanned in chunks"
    block_k = max(16, triton.next_power_of_2(shape.key_dim))
    most = max(16, triton.next_power_of_2(shape.value_dim))
    options = {"BLOCK_V": min(32, most), "num_warps": 8}
    deep = target().loads_past_registers and active.dtype.itemsize == 2  # three chunks of float32 exceed shared memory
    options |= {"STAGES": 3 if deep else 1, **(tuning or {})}
    inverse, mixed, levels, betas = launch_prepare(active, projected, weights, shape, work, gates)
    delta_carry_kernel[triton.cdiv(shape.value_dim, options["BLOCK_V"]), heads, len(meta.base)](
        out, inverse, mixed, levels, betas, active, *views, meta.runs, meta.base_run, meta.write_run, meta.tail_run,
        meta.base, meta.new_base, meta.start, meta.query_start, meta.checkpoint_run, meta.checkpoint_at,
        levels.stride(0), runs_stride, *strides, KEY_HEADS=shape.key_heads, VALUE_HEADS=heads, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, RING=shape.ring, **found, PLACES=max(16, triton.next_power_of_2(shape.ring)),
        BLOCK_K=block_k, SIZE=SIZE, **options, **launch_options(),
    )  # fmt: skip
