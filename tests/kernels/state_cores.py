"""A core of the gated delta rule that may replace engine/kernels/state/delta_scan's; gpu_state --core v2 times it.

With X, M, G as there and W = X beta e^G K, C = X beta V:

    terms    W and C                                                                       chunks in parallel
    chain    U = C - W S;  S = e^{G_n} S + (e^{G_n - G} K)' U; writes U, and S before each chunk   chunks in order
    outputs  O = e^G Q S + M U                                                             chunks in parallel

Of the five products per chunk, three of which depend on each other, two remain in the chain. Per chunk and head, 32 KB
more are written and read. It is not measured yet: then it replaces the present core or is deleted with this file.
Arguments and results are those of delta_scan.launch_core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_inputs import gate_of
from engine.kernels.state.delta_prepare import SIZE, exact_dot, inverse_blocks, lower_block, part_of
from engine.kernels.state.delta_scan import launch_core
from engine.kernels.state.delta_step import places_of
from engine.kernels.state.folds import any_between, ends_of, exact_product, store_due, write_states
from engine.kernels.state.runs import decay_between, is_short, row_at, running_sum, sigmoid
from engine.kernels.target import target, tl, triton
from tests.kernels.state_lean import launch_lean_core


@triton.jit
def blocks_times(blocks, factors, source, step, left, lanes, COUNT: tl.constexpr, PART: tl.constexpr):
    """The sum over j < COUNT of blocks[j] times factors[j] times rows PART * j.. of `source`, rounded like `source`."""
    kind = source.dtype.element_ty
    total = tl.dot(
        blocks[0].to(kind), scaled_rows(source, factors[0], lanes & (left > 0), kind), input_precision="ieee"
    )
    for j in tl.static_range(1, COUNT):
        rows = scaled_rows(source + j * step, factors[j], lanes & (left > j * PART), kind)
        total += tl.dot(blocks[j].to(kind), rows, input_precision="ieee")
    return total.to(kind)


@triton.jit
def scaled_rows(at, factor, mask, kind: tl.constexpr):
    """Rows at `at`, times a factor each."""
    return (tl.load(at, mask=mask, other=0.0).to(tl.float32) * factor).to(kind)


@triton.jit
def terms_kernel(
    far,  # [T, VALUE_HEADS, KEY_DIM]: W
    near,  # [T, VALUE_HEADS, VALUE_DIM]: C
    levels,  # [VALUE_HEADS, T] float32
    active, projected, a_log, dt_bias, chunks, num_chunks,
    level_stride, projected_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    B: tl.constexpr, A: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one chunk of one value head; the inverse is delta_prepare's."""
    grid_wait(OVERLAP)
    number, head = tl.program_id(1), tl.program_id(0)
    if number < tl.load(num_chunks):
        token, count = tl.load(chunks + number * 4 + 1), tl.load(chunks + number * 4 + 2)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        i, c, part, d = tl.arange(0, 4 * PART), tl.arange(0, BLOCK_K), tl.arange(0, PART), tl.arange(0, BLOCK_V)
        there = i < count
        line = projected + (token + i).to(tl.int64) * projected_stride + head
        gate = gate_of(tl.load(line + A, mask=there, other=0.0), tl.load(a_log + head), tl.load(dt_bias + head))
        level = running_sum(tl.where(there, gate, 0.0), 4 * PART)
        beta = tl.where(there, sigmoid(tl.load(line + B, mask=there, other=0.0).to(tl.float32)), 0.0)
        tl.store(levels + head * level_stride + token + i, level, mask=there)
        g0, g1 = part_of(level, 0, PART), part_of(level, 1, PART)
        g2, g3 = part_of(level, 2, PART), part_of(level, 3, PART)
        b0, b1 = part_of(beta, 0, PART)[:, None], part_of(beta, 1, PART)[:, None]
        b2, b3 = part_of(beta, 2, PART)[:, None], part_of(beta, 3, PART)[:, None]
        width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        at = (token + part).to(tl.int64)[:, None] * width + key_head * KEY_DIM + c[None, :]
        k, step = active + KEY_HEADS * KEY_DIM + at, PART * width
        in_key, left = (c < KEY_DIM)[None, :], count - part[:, None]
        turned = (token + part).to(tl.int64)[None, :] * width + (KEY_HEADS + key_head) * KEY_DIM + c[:, None]
        t, in_keys, right = active + turned, (c < KEY_DIM)[:, None], count - part[None, :]
        k0, t0 = tl.load(k, mask=in_key & (left > 0), other=0.0), tl.load(t, mask=in_keys & (right > 0), other=0.0)
        a00 = b0 * lower_block(k0, t0, g0, g0, 1, PART)
        k1 = tl.load(k + step, mask=in_key & (left > PART), other=0.0)
        a10 = b1 * lower_block(k1, t0, g1, g0, -1, PART)
        k2 = tl.load(k + 2 * step, mask=in_key & (left > 2 * PART), other=0.0)
        a20 = b2 * lower_block(k2, t0, g2, g0, -1, PART)
        k3 = tl.load(k + 3 * step, mask=in_key & (left > 3 * PART), other=0.0)
        a30 = b3 * lower_block(k3, t0, g3, g0, -1, PART)
        t1 = tl.load(t + step, mask=in_keys & (right > PART), other=0.0)
        a11 = b1 * lower_block(k1, t1, g1, g1, 1, PART)
        a21 = b2 * lower_block(k2, t1, g2, g1, -1, PART)
        a31 = b3 * lower_block(k3, t1, g3, g1, -1, PART)
        t2 = tl.load(t + 2 * step, mask=in_keys & (right > 2 * PART), other=0.0)
        a22 = b2 * lower_block(k2, t2, g2, g2, 1, PART)
        a32 = b3 * lower_block(k3, t2, g3, g2, -1, PART)
        t3 = tl.load(t + 3 * step, mask=in_keys & (right > 3 * PART), other=0.0)
        a33 = b3 * lower_block(k3, t3, g3, g3, 1, PART)
        x00, x11, x22, x33 = inverse_blocks(a00, a11, a22, a33, PART)
        x10 = -exact_dot(x11, exact_dot(a10, x00))
        x21 = -exact_dot(x22, exact_dot(a21, x11))
        x32 = -exact_dot(x33, exact_dot(a32, x22))
        x20 = -exact_dot(x22, exact_dot(a20, x00) + exact_dot(a21, x10))
        x31 = -exact_dot(x33, exact_dot(a31, x11) + exact_dot(a32, x21))
        x30 = -exact_dot(x33, exact_dot(a30, x00) + exact_dot(a31, x10) + exact_dot(a32, x20))
        put = far + ((token + part).to(tl.int64)[:, None] * VALUE_HEADS + head) * KEY_DIM + c[None, :]
        down: tl.constexpr = PART * VALUE_HEADS * KEY_DIM
        f = b0 * tl.exp(g0)[:, None], b1 * tl.exp(g1)[:, None], b2 * tl.exp(g2)[:, None], b3 * tl.exp(g3)[:, None]
        tl.store(put, blocks_times((x00,), f, k, step, left, in_key, 1, PART), mask=in_key & (left > 0))
        w = blocks_times((x10, x11), f, k, step, left, in_key, 2, PART)
        tl.store(put + down, w, mask=in_key & (left > PART))
        w = blocks_times((x20, x21, x22), f, k, step, left, in_key, 3, PART)
        tl.store(put + 2 * down, w, mask=in_key & (left > 2 * PART))
        w = blocks_times((x30, x31, x32, x33), f, k, step, left, in_key, 4, PART)
        tl.store(put + 3 * down, w, mask=in_key & (left > 3 * PART))
        v = active + (token + part).to(tl.int64)[:, None] * width + 2 * KEY_HEADS * KEY_DIM
        v += head * VALUE_DIM + d[None, :]
        put = near + ((token + part).to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUE_DIM + d[None, :]
        b, in_value, over = (b0, b1, b2, b3), (d < VALUE_DIM)[None, :], PART * VALUE_HEADS * VALUE_DIM
        tl.store(put, blocks_times((x00,), b, v, step, left, in_value, 1, PART), mask=in_value & (left > 0))
        w = blocks_times((x10, x11), b, v, step, left, in_value, 2, PART)
        tl.store(put + over, w, mask=in_value & (left > PART))
        w = blocks_times((x20, x21, x22), b, v, step, left, in_value, 3, PART)
        tl.store(put + 2 * over, w, mask=in_value & (left > 2 * PART))
        w = blocks_times((x30, x31, x32, x33), b, v, step, left, in_value, 4, PART)
        tl.store(put + 3 * over, w, mask=in_value & (left > 3 * PART))


@triton.jit
def number_of(token, first, row):
    """The place of the state before the chunk that begins at `token`; `first`: the row's first token."""
    return token // 64 + 2 * row + (token > first).to(tl.int32)


@triton.jit
def chain_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM]: U
    before,  # [places, VALUE_HEADS, VALUE_DIM, KEY_DIM]
    far, near, levels, active,
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
        if RING > 0 and begin > behind:
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
        newest = tl.maximum(tl.load(new_base + row), begin + count - RING)
        ends = ends_of(row, write_run, new_base, checkpoint_run, checkpoint_at)
        for chunk in tl.range(begin // SIZE, (begin + count - 1) // SIZE + 1, num_stages=STAGES):
            left = tl.maximum(chunk * SIZE, begin)
            right = tl.minimum((chunk + 1) * SIZE, begin + count)
            there, token = i < right - left, (first + left - begin + i).to(tl.int64)
            in_chunk, line = in_value[:, None] & there[None, :], active + token * width
            w_at = far + ((token * VALUE_HEADS + head) * KEY_DIM)[None, :] + c[:, None]
            w = tl.load(w_at, mask=in_key[:, None] & there[None, :], other=0.0)
            place = ((token * VALUE_HEADS + head) * VALUE_DIM)[None, :] + d[:, None]
            u = tl.load(near + place, mask=in_chunk, other=0.0).to(tl.float32)
            k_at = line[:, None] + (KEY_HEADS + key_head) * KEY_DIM + c[None, :]
            k = tl.load(k_at, mask=there[:, None] & in_key[None, :], other=0.0)
            level = tl.load(levels + head * level_stride + token, mask=there, other=0.0)
            known = state.to(kind)
            u -= tl.dot(known, w, input_precision="ieee")
            number = number_of(first + left - begin, first, row).to(tl.int64)
            known_at = before + ((number * VALUE_HEADS + head) * VALUE_DIM + d)[:, None] * KEY_DIM + c[None, :]
            tl.store(known_at, known, mask=in_value[:, None] & in_key[None, :])
            tl.store(out + place, u.to(out.dtype.element_ty), mask=in_chunk)
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
            total = tl.load(levels + head * level_stride + first + right - begin - 1)
            u *= decay_between(total, level, there)[None, :]
            state = state * tl.exp(total) + tl.dot(u.to(kind), k, input_precision="ieee")
            if RING == 0:
                state = store_due(
                    state, ends, left, right, row, states, runs, write_run, new_base, checkpoint_run, checkpoint_at,
                    head, d, runs_stride, state_stride, KEY_DIM, VALUE_DIM, STATE_FIRST, STATE_EACH, BLOCK_K,
                )  # fmt: skip


@triton.jit
def outputs_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM]: U on entry, then O
    before, levels, active, chunks, num_chunks, query_start,
    level_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_V columns of one chunk of one value head, its U in place, 32 positions at a time."""
    grid_wait(OVERLAP)
    LINES: tl.constexpr = SIZE // 2
    number, head = tl.program_id(2), tl.program_id(1)
    if number < tl.load(num_chunks):
        row = tl.load(chunks + number * 4)
        token, count = tl.load(chunks + number * 4 + 1), tl.load(chunks + number * 4 + 2)
        place = number_of(token, tl.load(query_start + row), row).to(tl.int64)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        i, j, c = tl.arange(0, LINES), tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
        d = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_key, in_value = c < KEY_DIM, d < VALUE_DIM
        kind: tl.constexpr = active.dtype.element_ty
        width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        state = before + ((place * VALUE_HEADS + head) * VALUE_DIM + d)[None, :] * KEY_DIM + c[:, None]
        state = tl.load(state, mask=in_key[:, None] & in_value[None, :], other=0.0)
        u = out + ((token + j).to(tl.int64) * VALUE_HEADS + head)[:, None] * VALUE_DIM + d[None, :]
        u = tl.load(u, mask=(j < count)[:, None] & in_value[None, :], other=0.0)
        turned = (token + j).to(tl.int64)[None, :] * width + (KEY_HEADS + key_head) * KEY_DIM + c[:, None]
        keys = tl.load(active + turned, mask=in_key[:, None] & (j < count)[None, :], other=0.0)
        level = tl.load(levels + head * level_stride + token + j, mask=j < count, other=0.0)
        tl.debug_barrier()  # every thread has read U
        for half in tl.static_range(2):
            line = half * LINES + i
            there = line < count
            at = (token + line).to(tl.int64)[:, None] * width + key_head * KEY_DIM + c[None, :]
            q = tl.load(active + at, mask=there[:, None] & in_key[None, :], other=0.0)
            own = tl.load(levels + head * level_stride + token + line, mask=there, other=0.0)
            mixed = tl.dot(q, keys, input_precision="ieee")
            mixed *= decay_between(own[:, None], level[None, :], (line[:, None] >= j[None, :]) & there[:, None])
            o = tl.dot(q, state, input_precision="ieee") * tl.exp(own)[:, None]
            o += tl.dot(mixed.to(kind), u, input_precision="ieee")
            put = out + ((token + line).to(tl.int64) * VALUE_HEADS + head)[:, None] * VALUE_DIM + d[None, :]
            tl.store(put, o.to(out.dtype.element_ty), mask=there[:, None] & in_value[None, :])


def launch_terms(
    active: Tensor, projected: Tensor, weights: DeltaWeights, shape: DeltaShape, meta: StateMeta,
    gates: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns far and near in the dtype of `active`, levels [value_heads, T] float32."""
    tokens, heads, work = len(active), shape.value_heads, meta.work
    assert work is not None
    far, near = (active.new_empty(tokens, heads, size) for size in (shape.key_dim, shape.value_dim))
    levels = weights.a_log.new_empty(heads, tokens)
    b, a = gates or shape.columns[2:4]
    terms_kernel[heads, len(work.chunks)](
        far, near, levels, active, projected, weights.a_log, weights.dt_bias, work.chunks, work.count,
        levels.stride(0), projected.stride(0), KEY_HEADS=shape.key_heads, VALUE_HEADS=heads, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, B=b, A=a, BLOCK_K=side(shape.key_dim), BLOCK_V=side(shape.value_dim),
        PART=SIZE // 4, num_warps=4, **launch_options(),
    )  # fmt: skip
    return far, near, levels


def side(size: int) -> int:
    """The side of a tile."""
    return max(16, int(triton.next_power_of_2(size)))


def launch_parallel_core(
    active: Tensor, projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta,
    out: Tensor, tuning: dict[str, Any] | None = None, gates: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Launches the three kernels; arguments as delta_scan.launch_core, `tuning`: options of the chain."""
    views, (runs_stride, *strides), found = places_of(cache, meta)
    heads, work = shape.value_heads, meta.work
    assert work is not None
    deep = target().loads_past_registers and active.dtype.itemsize == 2
    options = {"BLOCK_V": min(32, side(shape.value_dim)), "num_warps": 8, "STAGES": 3 if deep else 1}
    options |= tuning or {}
    far, near, levels = launch_terms(active, projected, weights, shape, meta, gates)
    places = len(active) // SIZE + 2 * len(meta.base) + 1
    before = active.new_empty(places, heads, shape.value_dim, shape.key_dim)
    sizes = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": heads, "KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim}
    block_k, block_v = side(shape.key_dim), min(64, side(shape.value_dim))
    chain_kernel[triton.cdiv(shape.value_dim, options["BLOCK_V"]), heads, len(meta.base)](
        out, before, far, near, levels, active, *views, meta.runs, meta.base_run, meta.write_run, meta.tail_run,
        meta.base, meta.new_base, meta.start, meta.query_start, meta.checkpoint_run, meta.checkpoint_at,
        levels.stride(0), runs_stride, *strides, **sizes, RING=shape.ring, **found,
        PLACES=max(16, triton.next_power_of_2(shape.ring)), BLOCK_K=block_k, SIZE=SIZE, **options, **launch_options(),
    )  # fmt: skip
    outputs_kernel[triton.cdiv(shape.value_dim, block_v), heads, len(work.chunks)](
        out, before, levels, active, work.chunks, work.count, meta.query_start, levels.stride(0), **sizes,
        BLOCK_K=block_k, BLOCK_V=block_v, SIZE=SIZE, num_warps=4, **launch_options(),
    )  # fmt: skip


CORES: dict[str, Callable[..., None]] = {"present": launch_core, "v2": launch_parallel_core, "lean": launch_lean_core}
