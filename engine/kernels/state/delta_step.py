"""Triton kernel of one step of the gated delta rule for short rows: positions after the base fit in the ring.

A program computes one value head of one row. It reads the state once, PIECE channels of the key at a time; a channel is
contiguous in memory. It also reads u from the tail, and the terms of each token from delta_inputs, and computes:

    o_t = e^{G_t} S q_t + sum over j <= t of e^{G_t - G_j} (k_j.q_t) u_j        G: sums of gates from the base on
    u_t = beta (v_t - e^{G_t} S k_t - sum over j < t of e^{G_t - G_j} (k_j.k_t) u_j)

u goes into the tail; o is normalised, gated and written to `out`. If the step leaves a later base, the program reads
the state again and writes the one at that base: a product of keys and changes, whose loads are all in flight at once.
If a row has several tokens, the program reads the state once for each token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_inputs import decay_behind, launch_delta_inputs
from engine.kernels.state.folds import exact_rows
from engine.kernels.state.runs import piece_at, plan_of, row_at, sigmoid
from engine.kernels.target import target, tl, triton


@triton.jit
def folded(
    state, decay, weights, settled, behind, head, key_head, c, d, tail, keys, deltas, key_stride, delta_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr,
    DELTA_EACH: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Folds `settled` positions after the base into channels c of a state; loads of FOLD positions overlap."""
    state *= decay
    for begin in tl.range(0, settled, FOLD, num_stages=1, disable_licm=True):
        j = begin + tl.arange(0, FOLD)
        there, slot = j < settled, (behind + j) % RING
        at = row_at(tail, slot, key_stride, there, KEY_FIRST, KEY_EACH, KEY_HEADS * KEY_DIM) + key_head * KEY_DIM
        found = tl.load(keys + at[None, :] + c[:, None], mask=there[None, :] & (c < KEY_DIM)[:, None], other=0.0)
        at = row_at(tail, slot * VALUE_HEADS + head, delta_stride, there, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
        change = tl.load(deltas + at[:, None] + d[None, :], mask=there[:, None] & (d < VALUE_DIM)[None, :], other=0.0)
        change = change.to(tl.float32) * tl.load(weights + j, mask=there, other=0.0)[:, None]
        state += exact_rows(found, change)
    return state


@triton.jit
def piece_of(
    blocks, head, piece, d, has, state_stride, FIRST: tl.constexpr, EACH: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Offsets of one piece of a head's state [PIECE, columns] in the pages of a run, and the mask of its numbers."""
    c, line = piece * PIECE + tl.arange(0, PIECE), head * KEY_DIM + piece * PIECE
    at = piece_at(blocks, line, state_stride, c < KEY_DIM, FIRST, EACH, VALUE_DIM, KEY_DIM, PIECE, EARLY)
    return at[:, None] + d[None, :], (c < KEY_DIM)[:, None] & has[None, :]


@triton.jit
def read_piece(
    states, blocks, head, piece, d, has, state_stride, FIRST: tl.constexpr, EACH: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A piece of a head's state, float32. EARLY: as in `row_at`."""
    place, lanes = piece_of(blocks, head, piece, d, has, state_stride, FIRST, EACH, KEY_DIM, VALUE_DIM, PIECE, EARLY)
    found = tl.load(states + place, mask=lanes, other=0.0, cache_modifier=".cg" if EARLY else "")
    return found.to(tl.float32)


@triton.jit
def write_piece(
    state, states, blocks, head, piece, d, in_value, state_stride, FIRST: tl.constexpr, EACH: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Writes a piece of a head's state into a run."""
    place, lanes = piece_of(blocks, head, piece, d, in_value, state_stride, FIRST, EACH, KEY_DIM, VALUE_DIM, PIECE)
    tl.store(states + place, state.to(states.dtype.element_ty), mask=lanes)


@triton.jit
def fold_piece(
    states, keys, deltas, old, new, tail, decay, weights, settled, behind, head, key_head, piece, d, has, in_value,
    state_stride, key_stride, delta_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RING: tl.constexpr, STATE_FIRST: tl.constexpr,
    STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr,
    DELTA_EACH: tl.constexpr, FOLD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Folds the settled positions into a piece of run `old`; writes the piece into run `new`."""
    state = read_piece(
        states, old, head, piece, d, has, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM, PIECE, False
    )
    state = folded(
        state, decay, weights, settled, behind, head, key_head, piece * PIECE + tl.arange(0, PIECE), d, tail, keys,
        deltas, key_stride, delta_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, KEY_FIRST, KEY_EACH,
        DELTA_FIRST, DELTA_EACH, FOLD,
    )  # fmt: skip
    write_piece(
        state, states, new, head, piece, d, in_value, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM, PIECE
    )


@triton.jit
def gated_norm(o, norm, z, d, eps, VALUE_DIM: tl.constexpr, SIGMOID: tl.constexpr):
    """norm(o) times z's activation, float32 [columns]."""
    o, gate = o.to(tl.float32), tl.load(z + d, mask=d < VALUE_DIM, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 0) / VALUE_DIM + eps) * tl.load(norm + d, mask=d < VALUE_DIM, other=0.0)
    return o * (sigmoid(gate) * (1.0 if SIGMOID else gate))


@triton.jit
def delta_step_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM]
    heads,  # [T, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM] float32
    near,  # [T, VALUE_HEADS, 3, PLACES] float32
    projected,  # [T, q | k | v | z | b | a]
    norm,  # [VALUE_DIM]
    states, keys, deltas, gates,  # the pages in the dtypes of these parts
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run,
    eps,
    runs_stride, projected_stride, state_stride, key_stride, delta_stride, gate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    Z: tl.constexpr, B: tl.constexpr,  # columns of `projected`
    SIGMOID: tl.constexpr, RING: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr,
    DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr,
    PLACES: tl.constexpr,  # power of two >= RING
    FOLD: tl.constexpr, PIECE: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one value head of one row."""
    row, head = tl.program_id(1), tl.program_id(0)
    key_width: tl.constexpr = KEY_HEADS * KEY_DIM
    width: tl.constexpr = 2 * key_width + VALUE_HEADS * VALUE_DIM
    pieces: tl.constexpr = (KEY_DIM + PIECE - 1) // PIECE
    first, count, behind, settled, held, base_blocks, tail, short = plan_of(
        row, runs, base_run, tail_run, base, new_base, start, query_start, checkpoint_run, runs_stride, RING
    )
    left = runs + tl.load(write_run + row, cache_modifier=".cg").to(tl.int64) * runs_stride
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    d, j = tl.arange(0, BLOCK_V), tl.arange(0, PLACES)
    in_value, slot = d < VALUE_DIM, (behind + j) % RING
    has = d < tl.where((behind > 0) & short, VALUE_DIM, 0)
    whole = tl.zeros([1], tl.float32)
    if pieces == 1:  # states of earlier steps, too, are read before the wait
        whole = read_piece(
            states, base_blocks, head, 0, d, has, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM, PIECE, True
        )
    grid_wait(OVERLAP)
    if short:
        gate_at = row_at(tail, slot, gate_stride, j < held + count, GATE_FIRST, GATE_EACH, VALUE_HEADS)
        gate = tl.load(gates + gate_at + head, mask=j < held + count, other=0.0)
        decay = decay_behind(gate, j, -1, settled)
        factors = near + (first.to(tl.int64) * VALUE_HEADS + head) * (3 * PLACES) + 2 * PLACES
        for t in tl.range(count, disable_licm=True):
            token = (first + t).to(tl.int64)
            made = heads + token * width + key_head * KEY_DIM
            far_k, far_q = tl.zeros([BLOCK_V], tl.float32), tl.zeros([BLOCK_V], tl.float32)
            for piece in tl.range(pieces, num_stages=1, disable_licm=True):
                c = piece * PIECE + tl.arange(0, PIECE)
                if pieces == 1:
                    state = whole
                else:
                    state = read_piece(
                        states, base_blocks, head, piece, d, has, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM,
                        VALUE_DIM, PIECE, False,
                    )  # fmt: skip
                q = tl.load(made + c, mask=c < KEY_DIM, other=0.0)
                k = tl.load(made + key_width + c, mask=c < KEY_DIM, other=0.0)
                far_k += tl.sum(state * k[:, None], 0)
                far_q += tl.sum(state * q[:, None], 0)
            seen = j < held + t
            change_at = row_at(tail, slot * VALUE_HEADS + head, delta_stride, seen, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
            old = seen[:, None] & in_value[None, :]
            change = tl.load(deltas + change_at[:, None] + d[None, :], mask=old, other=0.0).to(tl.float32)
            weights = near + (token * VALUE_HEADS + head) * (3 * PLACES) + j
            near_k, near_q = tl.load(weights), tl.load(weights + PLACES)
            own_q = tl.sum(tl.where(j == held + t, near_q, 0.0), 0)
            far = decay_behind(gate, j, -1, held + t + 1)
            other = projected + token * projected_stride
            beta = sigmoid(tl.load(other + B + head).to(tl.float32))
            v = tl.load(heads + token * width + 2 * key_width + head * VALUE_DIM + d, mask=in_value, other=0.0)
            u = beta * (v - far_k * far - tl.sum(change * near_k[:, None], 0))
            kept_u = u.to(deltas.dtype.element_ty)
            o = far_q * far + tl.sum(change * near_q[:, None], 0) + kept_u.to(tl.float32) * own_q
            o = gated_norm(o.to(out.dtype.element_ty), norm, other + Z + head * VALUE_DIM, d, eps, VALUE_DIM, SIGMOID)
            result = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + d
            tl.store(result, o.to(out.dtype.element_ty), mask=in_value)
            new = (behind + held + t) % RING * VALUE_HEADS + head
            put = row_at(tail, new, delta_stride, count > 0, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
            tl.store(deltas + put + d, kept_u, mask=in_value)
            if (count > 1) | (settled > held):
                tl.debug_barrier()  # further tokens and a fold read u
        if settled > 0:
            for piece in tl.range(pieces, disable_licm=True):
                fold_piece(
                    states, keys, deltas, base_blocks, left, tail, decay, factors, settled, behind, head, key_head,
                    piece, d, has, in_value, state_stride, key_stride, delta_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM,
                    VALUE_DIM, RING, STATE_FIRST, STATE_EACH, KEY_FIRST, KEY_EACH, DELTA_FIRST, DELTA_EACH, FOLD,
                    PIECE,
                )  # fmt: skip


def places_of(cache: StatePages, meta: StateMeta) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int]]:
    """Views of the pages as states, keys, deltas and gates; strides; constants of the parts' places in a run."""
    parts = dict(zip(("STATE", "KEY", "DELTA", "GATE"), (cache.state[0], *cache.tail[:3])))
    views = tuple(cache.pages.view(place.dtype) for place in parts.values())
    found = {f"{name}_FIRST": place.first for name, place in parts.items()}
    found |= {f"{name}_EACH": place.per_page for name, place in parts.items()}
    return views, (meta.runs.stride(0), *(view.stride(0) for view in views)), found


def launch_delta_step(
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
    tuning: dict[str, Any] | None = None,
) -> None:
    """Writes the tokens of short rows into `out` [T, value_width], in two launches."""
    places = max(16, triton.next_power_of_2(shape.ring))
    heads, near = launch_delta_inputs(projected, weights, shape, cache, meta, places)
    launch_states(heads, near, projected, weights, shape, cache, meta, out, tuning)


def launch_states(
    heads: Tensor,
    near: Tensor,
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
    tuning: dict[str, Any] | None = None,
) -> None:
    """Launches delta_step_kernel with the results of delta_inputs."""
    views, (runs_stride, *strides), found = places_of(cache, meta)
    _, z, b, _, _ = shape.columns
    options = {"FOLD": 16, **(tuning or step_options(shape, len(meta.base)))}
    delta_step_kernel[shape.value_heads, len(meta.base)](
        out, heads, near, projected, weights.norm, *views, meta.runs, meta.base_run, meta.write_run, meta.tail_run,
        meta.base, meta.new_base, meta.start, meta.query_start, meta.checkpoint_run, shape.eps, runs_stride,
        projected.stride(0), *strides, KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, Z=z, B=b, SIGMOID=shape.sigmoid, RING=shape.ring, **found,
        PLACES=near.shape[-1],
        BLOCK_V=triton.next_power_of_2(shape.value_dim), **options, **launch_options(),
    )  # fmt: skip


def step_options(shape: DeltaShape, rows: int) -> dict[str, Any]:
    """How a program reads its state, as measured on an H200 with 32 heads of 128 x 128.

    Few programs hold a whole state each, so that all loads are in flight at once. Of many programs each is one warp: a
    sum over the channels then needs no other warp.
    """
    few = shape.value_heads * rows <= 2 * target().num_units
    numbers, warps = (1 << 14, 4) if few else (1 << 12, 1)
    most = triton.next_power_of_2(shape.key_dim)
    return {"PIECE": min(most, max(8, numbers // triton.next_power_of_2(shape.value_dim))), "num_warps": warps}
