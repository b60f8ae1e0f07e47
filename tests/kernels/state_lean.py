"""A core of the gated delta rule with fewer instructions; gpu_state --core lean times it.

The kernels and the equations are delta_scan's. What differs:

    prepare   Inverts I + A by X - X C X, from blocks of 2 to blocks of 64 (C: what lies below a pair of blocks on the
              diagonal): six products of four blocks each instead of 15 turns of substitution; products of keys and
              decays are made once for the chunk. Writes X beta, M and decays [places, heads, ..], zeros behind a
              chunk's end.
    carry     Loads these without masks, and has no exponentials, no masks of channels and no addresses per token
              beyond 32-bit offsets that do not change between chunks.

It is not measured yet: then it replaces the present core or is deleted with this file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_inputs import gate_of
from engine.kernels.state.delta_prepare import SIZE
from engine.kernels.state.delta_step import places_of
from engine.kernels.state.folds import any_between, ends_of, exact_product, store_due, write_states
from engine.kernels.state.runs import decay_between, is_short, row_at, running_sum, sigmoid
from engine.kernels.target import target, tl, triton

PART = 16


@triton.jit
def inverse_of(a, PART: tl.constexpr, PRECISION: tl.constexpr):
    """Inverts I + a for a strictly lower triangular a [4 * PART, 4 * PART] float32.

    Returns the left and the right half of the inverse, [4 * PART, 2 * PART] each.
    """
    i = tl.arange(0, 4 * PART)
    quarter, half = i[:, None, None] // PART, i[:, None, None] // (2 * PART)
    two, lower = tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[:, None, None] == 1
    # Four blocks on the diagonal [4, PART, PART].
    own = tl.sum(tl.where(quarter == tl.arange(0, 4)[None, :, None], tl.reshape(a, [4 * PART, 4, PART]), 0.0), 1)
    own = tl.reshape(own, [4, PART, PART])
    p, q = tl.arange(0, PART)[None, :, None], tl.arange(0, PART)[None, None, :]
    x = tl.where(p == q, 1.0, 0.0) - tl.where(p // 2 == q // 2, own, 0.0)
    for turn in tl.static_range(1, 4):
        below = tl.where((p >> turn + 1 == q >> turn + 1) & (p >> turn != q >> turn), own, 0.0)
        x -= tl.dot(x, tl.dot(below, x, input_precision=PRECISION), input_precision=PRECISION)
    # Two blocks [2, 2 * PART, 2 * PART].
    x = tl.where(quarter % 2 == two, tl.reshape(x, [4 * PART, 1, PART]), 0.0)
    x = tl.reshape(x, [2, 2 * PART, 2 * PART])
    halves = tl.reshape(a, [4 * PART, 2, 2 * PART])
    own = tl.sum(tl.where(half == two, halves, 0.0), 1)
    p, q = i[:, None] % (2 * PART) // PART, tl.arange(0, 2 * PART)[None, :] // PART
    below = tl.reshape(tl.where(p != q, own, 0.0), [2, 2 * PART, 2 * PART])
    x -= tl.dot(x, tl.dot(below, x, input_precision=PRECISION), input_precision=PRECISION)
    # The block left of the lower one.
    below = tl.reshape(tl.sum(tl.where(two == 0, halves, 0.0), 1), [2, 2 * PART, 2 * PART])
    below = tl.sum(tl.where(lower, below, 0.0), 0)
    first, second = tl.sum(tl.where(lower, 0.0, x), 0), tl.sum(tl.where(lower, x, 0.0), 0)
    below = tl.dot(second, tl.dot(below, first, input_precision=PRECISION), input_precision=PRECISION)
    left = tl.reshape(tl.where(lower, -below[None], x), [4 * PART, 2 * PART])
    return left, tl.reshape(tl.where(lower, x, 0.0), [4 * PART, 2 * PART])


@triton.jit
def place_of(token, first, row):
    """The place of the chunk that begins at `token`; `first`: the row's first token."""
    return token // 64 + 2 * row + (token > first).to(tl.int32)


@triton.jit
def lanes_of(size: tl.constexpr, BLOCK: tl.constexpr):
    """Which of BLOCK channels there are; a constant where it is all of them."""
    return tl.full([BLOCK], True, tl.int1) if size == BLOCK else tl.arange(0, BLOCK) < size


@triton.jit
def lean_prepare_kernel(
    inverse, mixed,  # [places, VALUE_HEADS, 64, 64]
    decays,  # [places, VALUE_HEADS, 2, 64] float32: e^{G_i} and e^{G_n - G_i}
    levels,  # [VALUE_HEADS, T] float32
    active, projected, a_log, dt_bias, chunks, num_chunks, query_start,
    level_stride, projected_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    B: tl.constexpr, A: tl.constexpr,
    BLOCK_K: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one chunk of one value head."""
    grid_wait(OVERLAP)
    number, head = tl.program_id(1), tl.program_id(0)
    if number < tl.load(num_chunks):
        row = tl.load(chunks + number * 4)
        token, count = tl.load(chunks + number * 4 + 1), tl.load(chunks + number * 4 + 2)
        place = place_of(token, tl.load(query_start + row), row).to(tl.int64) * VALUE_HEADS + head
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        SIZE: tl.constexpr = 4 * PART
        i, c, h = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), tl.arange(0, 2 * PART)
        there, in_key = i < count, lanes_of(KEY_DIM, BLOCK_K)
        width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        at = active + token.to(tl.int64) * width + key_head * KEY_DIM
        wide = i[:, None] * width + c[None, :]
        tall = i[None, :] * width + c[:, None]
        turned = tl.load(at + KEY_HEADS * KEY_DIM + tall, mask=in_key[:, None] & there[None, :], other=0.0)
        keys = tl.load(at + KEY_HEADS * KEY_DIM + wide, mask=in_key[None, :] & there[:, None], other=0.0)
        queries = tl.load(at + wide, mask=in_key[None, :] & there[:, None], other=0.0)
        line = projected + token.to(tl.int64) * projected_stride + head + i * projected_stride
        gate = gate_of(tl.load(line + A, mask=there, other=0.0), tl.load(a_log + head), tl.load(dt_bias + head))
        gate = tl.where(there, gate, 0.0)
        level, total = running_sum(gate, SIZE), tl.sum(gate, 0)
        beta = tl.where(there, sigmoid(tl.load(line + B, mask=there, other=0.0).to(tl.float32)), 0.0)
        tl.store(levels + head * level_stride + token + i, level, mask=there)
        tl.store(decays + place * (2 * SIZE) + i, tl.exp(level))
        tl.store(decays + place * (2 * SIZE) + SIZE + i, decay_between(total, level, there))
        decay = decay_between(level[:, None], level[None, :], i[:, None] >= i[None, :])
        square = place * (SIZE * SIZE)
        products = tl.dot(queries, turned, input_precision="ieee") * decay
        tl.store(mixed + square + (i[:, None] * SIZE + i[None, :]), products.to(mixed.dtype.element_ty))
        a = tl.dot(keys, turned, input_precision="ieee") * decay * beta[:, None]
        left, right = inverse_of(tl.where(i[:, None] > i[None, :], a, 0.0), PART, PRECISION)
        scale = tl.reshape(beta, [2, 2 * PART])
        upper = tl.arange(0, 2)[:, None] == 0
        left *= tl.sum(tl.where(upper, scale, 0.0), 0)[None, :]
        right *= tl.sum(tl.where(upper, 0.0, scale), 0)[None, :]
        at = square + (i[:, None] * SIZE + h[None, :])
        tl.store(inverse + at, left.to(inverse.dtype.element_ty))
        tl.store(inverse + at + 2 * PART, right.to(inverse.dtype.element_ty))


@triton.jit
def lean_carry_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM], before the norm
    inverse, mixed, decays, levels, active,
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
        in_key = lanes_of(KEY_DIM, BLOCK_K)
        in_value = tl.full([BLOCK_V], True, tl.int1) if VALUE_DIM % BLOCK_V == 0 else d < VALUE_DIM
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
        tall, wide = i[None, :] * width + c[:, None], i[:, None] * width + c[None, :]
        values = i[None, :] * width + d[:, None]
        turned_square = i[None, :] * SIZE + i[:, None]
        outs = i[None, :] * (VALUE_HEADS * VALUE_DIM) + d[:, None]
        for chunk in tl.range(begin // SIZE, (begin + count - 1) // SIZE + 1, num_stages=STAGES):
            left = tl.maximum(chunk * SIZE, begin)
            right = tl.minimum((chunk + 1) * SIZE, begin + count)
            there, token = i < right - left, first + left - begin
            in_chunk = in_value[:, None] & there[None, :]
            line = active + token.to(tl.int64) * width
            at = line + key_head * KEY_DIM
            q = tl.load(at + tall, mask=in_key[:, None] & there[None, :], other=0.0)
            turned = tl.load(at + KEY_HEADS * KEY_DIM + tall, mask=in_key[:, None] & there[None, :], other=0.0)
            k = tl.load(at + KEY_HEADS * KEY_DIM + wide, mask=there[:, None] & in_key[None, :], other=0.0)
            v_at = line + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
            v = tl.load(v_at + values, mask=in_chunk, other=0.0)
            place = place_of(token, first, row).to(tl.int64) * VALUE_HEADS + head
            x = tl.load(inverse + place * (SIZE * SIZE) + turned_square)  # [j, i]
            m = tl.load(mixed + place * (SIZE * SIZE) + turned_square)
            since = tl.load(decays + place * (2 * SIZE) + i)
            until = tl.load(decays + place * (2 * SIZE) + SIZE + i)
            total = tl.load(decays + place * (2 * SIZE) + right - left - 1)
            known = state.to(kind)
            u = v.to(tl.float32) - tl.dot(known, turned, input_precision="ieee") * since[None, :]
            u = tl.dot(u.to(kind), x, input_precision="ieee")
            o = tl.dot(known, q, input_precision="ieee") * since[None, :]
            o += tl.dot(u.to(kind), m, input_precision="ieee")
            put = out + token.to(tl.int64) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM
            tl.store(put + outs, o.to(out.dtype.element_ty), mask=in_chunk)
            if RING > 0 and any_between(ends, left, right):
                level = tl.load(levels + head * level_stride + token + i, mask=there, other=0.0)
                write_states(
                    state, k, u, level, left, right, row, states, runs, write_run, new_base, checkpoint_run,
                    checkpoint_at, head, d, runs_stride, state_stride, KEY_DIM, VALUE_DIM, STATE_FIRST, STATE_EACH,
                    BLOCK_K, SIZE, False,
                )  # fmt: skip
            if RING > 0 and right > newest:
                position = left + i
                kept_lanes = there & (position >= newest)
                slots = position % RING * VALUE_HEADS + head
                ring = row_at(tail, slots, delta_stride, kept_lanes, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
                lanes = in_value[:, None] & kept_lanes[None, :]
                tl.store(deltas + ring[None, :] + d[:, None], u.to(deltas.dtype.element_ty), mask=lanes)
            u *= until[None, :]
            state = state * total + tl.dot(u.to(kind), k, input_precision="ieee")
            if RING == 0:
                state = store_due(
                    state, ends, left, right, row, states, runs, write_run, new_base, checkpoint_run, checkpoint_at,
                    head, d, runs_stride, state_stride, KEY_DIM, VALUE_DIM, STATE_FIRST, STATE_EACH, BLOCK_K,
                )  # fmt: skip


def launch_lean_prepare(
    active: Tensor, projected: Tensor, weights: DeltaWeights, shape: DeltaShape, meta: StateMeta,
    gates: tuple[int, int] | None = None, warps: int = 4, precision: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns inverse, mixed [places, value_heads, SIZE, SIZE] in the dtype of `active`; decays [places, value_heads,
    2, SIZE], levels [value_heads, T] float32. `precision`: of the inverse's products."""
    heads, work, places = shape.value_heads, meta.work, len(active) // SIZE + 2 * len(meta.base) + 1
    assert work is not None
    if precision is None:
        precision = "tf32x3" if target().loads_past_registers and active.dtype.itemsize == 2 else "ieee"
    inverse, mixed = active.new_empty(2, places, heads, SIZE, SIZE).unbind(0)
    decays, levels = weights.a_log.new_empty(places, heads, 2, SIZE), weights.a_log.new_empty(heads, len(active))
    b, a = gates or shape.columns[2:4]
    lean_prepare_kernel[heads, len(work.chunks)](
        inverse, mixed, decays, levels, active, projected, weights.a_log, weights.dt_bias, work.chunks, work.count,
        meta.query_start, levels.stride(0), projected.stride(0), KEY_HEADS=shape.key_heads, VALUE_HEADS=heads,
        KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, B=b, A=a,
        BLOCK_K=max(16, triton.next_power_of_2(shape.key_dim)), PART=PART, PRECISION=precision, num_warps=warps,
        **launch_options(),
    )  # fmt: skip
    return inverse, mixed, decays, levels


def launch_lean_core(
    active: Tensor, projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta,
    out: Tensor, tuning: dict[str, Any] | None = None, gates: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Launches the two kernels; arguments as delta_scan.launch_core. `tuning`: options of the carry, and `warps` and
    `precision` of prepare."""
    views, (runs_stride, *strides), found = places_of(cache, meta)
    deep = target().loads_past_registers and active.dtype.itemsize == 2
    most = max(16, triton.next_power_of_2(shape.value_dim))
    options: dict[str, Any] = {"BLOCK_V": min(32, most), "num_warps": 4, "STAGES": 3 if deep else 1, **(tuning or {})}
    given = {name: options.pop(name) for name in ("warps", "precision") if name in options}
    made = launch_lean_prepare(active, projected, weights, shape, meta, gates, **given)
    lean_carry_kernel[triton.cdiv(shape.value_dim, options["BLOCK_V"]), shape.value_heads, len(meta.base)](
        out, *made, active, *views, meta.runs, meta.base_run, meta.write_run, meta.tail_run, meta.base, meta.new_base,
        meta.start, meta.query_start, meta.checkpoint_run, meta.checkpoint_at, made[3].stride(0), runs_stride, *strides,
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        RING=shape.ring, **found, PLACES=max(16, triton.next_power_of_2(shape.ring)),
        BLOCK_K=max(16, triton.next_power_of_2(shape.key_dim)), SIZE=SIZE, **options, **launch_options(),
    )  # fmt: skip
