"""Triton kernel of a step of the gated delta rule with one gate per channel of a key, for short rows.

A program computes one value head of one row. It reads the state, folds the tail's positions into it, and computes the
step's tokens one by one, normalised and gated. The formulas are delta_step's, but G sums the gates of one channel, so
e^{G_t - G_j} is a factor within the sums over channels. The kernel writes u and g of each token into the tail; the
convolution's kernel has written keys and inputs there before.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_inputs import gate_of
from engine.kernels.state.delta_step import places_of
from engine.kernels.state.runs import decay_between, is_short, row_at, run_of, sigmoid
from engine.kernels.target import tl, triton


@triton.jit
def step_gates(
    projected, gates, tail, a_log, dt_bias, slot, token, head, old, new, c, in_key, projected_stride, gate_stride,
    A: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Gates [lanes, BLOCK_K]: read from the tail where `old`, computed and stored where `new`."""
    speed, there = tl.load(a_log + head), old | new
    at = row_at(tail, slot, gate_stride, there, FIRST, EACH, VALUE_HEADS * KEY_DIM)
    place = gates + at[:, None] + head * KEY_DIM + c[None, :]
    old, new = old[:, None] & in_key[None, :], new[:, None] & in_key[None, :]
    a = projected + token[:, None] * projected_stride + A + head * KEY_DIM + c[None, :]
    bias = tl.load(dt_bias + head * KEY_DIM + c, mask=in_key, other=0.0)[None, :]
    made = gate_of(tl.load(a, mask=new, other=0.0), speed, bias)
    tl.store(place, made, mask=new)
    return tl.where(new, made, tl.load(place, mask=old, other=0.0))


@triton.jit
def fold(
    states, keys, deltas, old, new, tail, level, settled, behind, head, key_head, d, in_value, j, state_stride,
    key_stride, delta_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, STATE_FIRST: tl.constexpr,
    STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr,
    DELTA_EACH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Folds the positions behind..behind + settled - 1 into the state of run `old`; writes it into run `new`."""
    last = tl.sum(tl.where((j == settled - 1)[:, None], level, 0.0), 0)
    c = tl.arange(0, BLOCK_K)
    in_key, has = c < KEY_DIM, c < tl.where(behind > 0, KEY_DIM, 0)
    at = row_at(old, head * KEY_DIM + c, state_stride, has, STATE_FIRST, STATE_EACH, VALUE_DIM)
    state = tl.load(states + at[:, None] + d[None, :], mask=has[:, None] & in_value[None, :], other=0.0)
    state = state.to(tl.float32) * tl.exp(last)[:, None]
    for place in range(settled):
        slot = (behind + place) % RING
        key = keys + row_at(tail, slot, key_stride, settled > 0, KEY_FIRST, KEY_EACH, KEY_HEADS * KEY_DIM)
        k = tl.load(key + key_head * KEY_DIM + c, mask=in_key, other=0.0).to(tl.float32)
        line = slot * VALUE_HEADS + head
        u_at = row_at(tail, line, delta_stride, settled > 0, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
        u = tl.load(deltas + u_at + d, mask=in_value, other=0.0).to(tl.float32)
        k *= tl.exp(last - tl.sum(tl.where((j == place)[:, None], level, 0.0), 0))
        state += k[:, None] * u[None, :]
    at = row_at(new, head * KEY_DIM + c, state_stride, in_key, STATE_FIRST, STATE_EACH, VALUE_DIM)
    whole = in_key[:, None] & in_value[None, :]
    tl.store(states + at[:, None] + d[None, :], state.to(states.dtype.element_ty), mask=whole)


@triton.jit
def channel_step_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM]
    active,  # [T, q | k | v]
    projected,  # [T, q | k | v | z | b | a]
    a_log,  # [VALUE_HEADS]
    dt_bias,  # [VALUE_HEADS * KEY_DIM]
    norm,  # [VALUE_DIM]
    states, keys, deltas, gates,  # the pages in the dtypes of these parts
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run,
    eps,
    runs_stride, projected_stride, state_stride, key_stride, delta_stride, gate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    Z: tl.constexpr, B: tl.constexpr, A: tl.constexpr,  # columns of `projected`
    SIGMOID: tl.constexpr, RING: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr,
    DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr,
    PLACES: tl.constexpr,  # power of two >= RING
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    grid_wait(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    behind = tl.load(base + row)
    held = tl.load(start + row) - behind
    if (count > 0) & is_short(row, base, start, query_start, checkpoint_run, count > 0, RING):
        total = held + count
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        c, d, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, PLACES)
        in_key, in_value, there, fresh, old = c < KEY_DIM, d < VALUE_DIM, j < total, j >= held, j < held
        tail, base_blocks = (
            run_of(runs, tail_run, row, runs_stride, count > 0), run_of(runs, base_run, row, runs_stride, count > 0)
        )  # fmt: skip
        slot = (behind + j) % RING
        key_at = row_at(tail, slot, key_stride, there, KEY_FIRST, KEY_EACH, KEY_HEADS * KEY_DIM) + key_head * KEY_DIM
        past = tl.load(keys + key_at[:, None] + c[None, :], mask=there[:, None] & in_key[None, :], other=0.0)
        past = past.to(tl.float32)
        delta_at = row_at(tail, slot * VALUE_HEADS + head, delta_stride, there, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
        added = deltas + delta_at[:, None] + d[None, :]
        change = tl.load(added, mask=old[:, None] & in_value[None, :], other=0.0).to(tl.float32)
        tokens = (first + j - held).to(tl.int64)
        gate = step_gates(
            projected, gates, tail, a_log, dt_bias, slot, tokens, head, old, fresh & there, c, in_key, projected_stride,
            gate_stride, A, VALUE_HEADS, KEY_DIM, GATE_FIRST, GATE_EACH,
        )  # fmt: skip
        level = tl.cumsum(gate, 0)
        gain = tl.load(norm + d, mask=in_value, other=0.0)
        for t in range(held, total):
            token = (first + t - held).to(tl.int64)
            made = active + token * (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM)
            q = tl.load(made + key_head * KEY_DIM + c, mask=in_key, other=0.0).to(tl.float32)
            k = tl.load(made + (KEY_HEADS + key_head) * KEY_DIM + c, mask=in_key, other=0.0).to(tl.float32)
            v = tl.load(made + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + d, mask=in_value, other=0.0).to(tl.float32)
            line = projected + token * projected_stride
            beta = sigmoid(tl.load(line + B + head).to(tl.float32))
            now = tl.sum(tl.where((j == t)[:, None], level, 0.0), 0)  # [BLOCK_K]
            between = past * decay_between(now[None, :], level, (j <= t)[:, None])
            near_k, near_q = tl.sum(between * k[None, :], 1), tl.sum(between * q[None, :], 1)
            has = c < tl.where(behind > 0, KEY_DIM, 0)
            at = row_at(base_blocks, head * KEY_DIM + c, state_stride, has, STATE_FIRST, STATE_EACH, VALUE_DIM)
            lanes = has[:, None] & in_value[None, :]
            state = tl.load(states + at[:, None] + d[None, :], mask=lanes, other=0.0).to(tl.float32)
            far_k = tl.sum(state * (k * tl.exp(now))[:, None], 0)
            far_q = tl.sum(state * (q * tl.exp(now))[:, None], 0)
            near_k = tl.where(j < t, near_k, 0.0)
            near_q = tl.where(j <= t, near_q, 0.0)
            u = beta * (v - far_k - tl.sum(change * near_k[:, None], 0))
            u = u.to(deltas.dtype.element_ty).to(tl.float32)  # rounded as later steps read it
            change = tl.where((j == t)[:, None], u[None, :], change)
            o = far_q + tl.sum(change * near_q[:, None], 0)
            z = tl.load(line + Z + head * VALUE_DIM + d, mask=in_value, other=0.0).to(tl.float32)
            o *= tl.rsqrt(tl.sum(o * o, 0) / VALUE_DIM + eps) * gain
            o *= sigmoid(z) * (1.0 if SIGMOID else z)
            here = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + d
            tl.store(here, o.to(out.dtype.element_ty), mask=in_value)
        tl.store(added, change.to(deltas.dtype.element_ty), mask=(there & fresh)[:, None] & in_value[None, :])
        settled = tl.load(new_base + row) - behind
        if settled > 0:
            tl.debug_barrier()  # a short prompt folds values that this program has just stored
            fold(
                states, keys, deltas, base_blocks, run_of(runs, write_run, row, runs_stride, count > 0), tail, level,
                settled, behind, head, key_head, d, in_value, j, state_stride, key_stride, delta_stride, KEY_HEADS,
                VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, STATE_FIRST, STATE_EACH, KEY_FIRST, KEY_EACH, DELTA_FIRST,
                DELTA_EACH, BLOCK_K,
            )  # fmt: skip


def launch_channel_step(
    active: Tensor,
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
) -> None:
    """Writes the tokens of short rows into `out` [T, value_width]; `active`: the result of `launch_conv`."""
    views, (runs_stride, *strides), found = places_of(cache, meta)
    _, z, b, a, _ = shape.columns
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (shape.key_dim, shape.value_dim))
    channel_step_kernel[shape.value_heads, len(meta.base)](
        out, active, projected, weights.a_log, weights.dt_bias, weights.norm, *views, meta.runs, meta.base_run,
        meta.write_run, meta.tail_run, meta.base, meta.new_base, meta.start, meta.query_start, meta.checkpoint_run,
        shape.eps, runs_stride, projected.stride(0), *strides, KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, Z=z, B=b, A=a,
        SIGMOID=shape.sigmoid, RING=shape.ring, **found, PLACES=max(16, triton.next_power_of_2(shape.ring)),
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=max(1, min(8, block_k * block_v // 2048)), **launch_options(),
    )  # fmt: skip
