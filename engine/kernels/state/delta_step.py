"""Triton kernel of one step of the gated delta rule for short rows: positions after the base fit in the ring.

A program computes one value head of one row. It reads the state once, PIECE channels of the key at a time; a channel is
contiguous in memory. It also reads u from the tail, and the terms of each token from delta_inputs, and computes:

    o_t = e^{G_t} S q_t + sum over j <= t of e^{G_t - G_j} (k_j.q_t) u_j        G: sums of gates from the base on
    u_t = beta (v_t - e^{G_t} S k_t - sum over j < t of e^{G_t - G_j} (k_j.k_t) u_j)

u goes into the tail; o is normalised, gated and written to `out`. If the step leaves a later base, the program also
writes the state at that base, by a product of keys and changes: piece by piece while it reads for the first token, or
behind the last token if the new base lies behind the step's first position. If a row has several tokens, the program
reads the state once for each. While the program waits for delta_inputs, the first rows of the state and u come into L2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import fetch_run, grid_wait, launch_options
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_inputs import in_sixteens, launch_delta_inputs
from engine.kernels.state.runs import piece_at, plan_of, row_at, sigmoid
from engine.kernels.target import next_power_of_2, target, tl, triton


@triton.jit
def folded(
    state, decay, weights, settled, behind, head, key_head, c, d, tail, keys, deltas, key_stride, delta_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr,
    DELTA_EACH: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Folds `settled` positions after the base into channels c of a state; loads of FOLD positions overlap."""
    state *= decay
    for j in tl.range(0, settled, num_stages=1, disable_licm=True, loop_unroll_factor=FOLD):
        slot = (behind + j) % RING
        at = row_at(tail, slot, key_stride, j < settled, KEY_FIRST, KEY_EACH, KEY_HEADS * KEY_DIM) + key_head * KEY_DIM
        key = tl.load(keys + at + c, mask=c < KEY_DIM, other=0.0).to(tl.float32)
        at = row_at(tail, slot * VALUE_HEADS + head, delta_stride, j < settled, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
        change = tl.load(deltas + at + d, mask=d < VALUE_DIM, other=0.0).to(tl.float32) * tl.load(weights + j)
        state += key[:, None] * change[None, :]
    return state


@triton.jit
def piece_of(
    blocks, head, piece, d, has, state_stride, FIRST: tl.constexpr, EACH: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Offsets of one piece of a head's state [PIECE, columns] in the pages of a run, and the mask of its numbers."""
    c, line = piece * PIECE + tl.arange(0, PIECE), head * KEY_DIM + piece * PIECE
    at = piece_at(blocks, line, state_stride, c < KEY_DIM, FIRST, EACH, VALUE_DIM, KEY_DIM, PIECE)
    return at[:, None] + d[None, :], (c < KEY_DIM)[:, None] & has[None, :]


@triton.jit
def read_piece(
    states, blocks, head, piece, d, has, state_stride, FIRST: tl.constexpr, EACH: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A piece of a head's state, float32."""
    place, lanes = piece_of(blocks, head, piece, d, has, state_stride, FIRST, EACH, KEY_DIM, VALUE_DIM, PIECE)
    return tl.load(states + place, mask=lanes, other=0.0).to(tl.float32)


@triton.jit
def write_piece(
    state, states, blocks, head, piece, d, in_value, state_stride, FIRST: tl.constexpr, EACH: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Writes a piece of a head's state into a run."""
    place, lanes = piece_of(blocks, head, piece, d, in_value, state_stride, FIRST, EACH, KEY_DIM, VALUE_DIM, PIECE)
    tl.store(states + place, state.to(states.dtype.element_ty), mask=lanes)


@triton.jit
def fetch_rows(
    pages, blocks, line, there, page_stride, FIRST: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Starts copies of rows of a part into L2, before grid_wait; rows of whole 16 bytes."""
    size: tl.constexpr = WIDTH * pages.dtype.element_ty.primitive_bitwidth // 8
    fetch_run(pages + row_at(blocks, line, page_stride, there, FIRST, EACH, WIDTH, True), tl.where(there, size, 0))


@triton.jit
def near_sums(
    deltas, tail, weights, decays, held, behind, head, d, in_value, delta_stride, VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr, PLACES: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Sums of decayed u of `held` positions from `behind` on times k_j.k_t and k_j.q_t [columns], LINES at a time."""
    near_k, near_q = tl.zeros(d.shape, tl.float32), tl.zeros(d.shape, tl.float32)
    for begin in tl.range(0, held, LINES, num_stages=1, disable_licm=True):
        j = begin + tl.arange(0, LINES)
        seen = j < held
        at = row_at(tail, (behind + j) % RING * VALUE_HEADS + head, delta_stride, seen, FIRST, EACH, VALUE_DIM)
        u = tl.load(deltas + at[:, None] + d[None, :], mask=seen[:, None] & in_value[None, :], other=0.0).to(tl.float32)
        decay = tl.load(decays + j, mask=seen, other=0.0)
        near_k += tl.sum(u * (tl.load(weights + j, mask=seen, other=0.0) * decay)[:, None], 0)
        near_q += tl.sum(u * (tl.load(weights + PLACES + j, mask=seen, other=0.0) * decay)[:, None], 0)
    return near_k, near_q


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
    dots,  # [T, KEY_HEADS, 2, PLACES] float32
    decays,  # [T, VALUE_HEADS, 3, PLACES] float32
    projected,  # [T, q | k | v | z | b | a]
    norm,  # [VALUE_DIM]
    states, keys, deltas,  # the pages in the dtypes of these parts
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run,
    eps,
    runs_stride, projected_stride, state_stride, key_stride, delta_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    Z: tl.constexpr, B: tl.constexpr,  # columns of `projected`
    SIGMOID: tl.constexpr, RING: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr,
    DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr,
    PLACES: tl.constexpr,  # power of two >= RING
    LINES: tl.constexpr,  # positions whose u is loaded at once
    FOLD: tl.constexpr,  # positions whose loads overlap in a fold
    PIECE: tl.constexpr, BLOCK_V: tl.constexpr,
    FETCH: tl.constexpr,  # rows of the state that come into L2 before the wait, a power of two; 0: none, nor u
    OVERLAP: tl.constexpr,
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
    d = tl.arange(0, BLOCK_V)
    in_value = d < VALUE_DIM
    has = d < tl.where((behind > 0) & short, VALUE_DIM, 0)
    if OVERLAP and FETCH > 0:
        early, j = tl.arange(0, FETCH), tl.arange(0, PLACES)
        lines, seen = (behind + j) % RING * VALUE_HEADS + head, j < tl.where(short, held, 0)
        there, rows = early < tl.where((behind > 0) & short, KEY_DIM, 0), head * KEY_DIM + early
        fetch_rows(states, base_blocks, rows, there, state_stride, STATE_FIRST, STATE_EACH, VALUE_DIM)
        fetch_rows(deltas, tail, lines, seen, delta_stride, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
    grid_wait(OVERLAP)
    if short:
        late = settled > held  # the step's own tokens are folded too
        fold_at = tl.where(late, count, tl.where(settled > 0, 0, -1))
        of_fold = decays + (first.to(tl.int64) * VALUE_HEADS + head) * (3 * PLACES) + PLACES
        for t in tl.range(tl.where(late, count + 1, count), disable_licm=True):
            token = (first + tl.minimum(t, count - 1)).to(tl.int64)
            made = heads + token * width + key_head * KEY_DIM
            weights = dots + (token * KEY_HEADS + key_head) * (2 * PLACES)
            decay = decays + (token * VALUE_HEADS + head) * (3 * PLACES)
            near_k, near_q = near_sums(
                deltas, tail, weights, decay, held + t, behind, head, d, in_value, delta_stride, VALUE_HEADS, VALUE_DIM,
                RING, DELTA_FIRST, DELTA_EACH, PLACES, LINES,
            )  # fmt: skip
            own_q, far = tl.load(weights + PLACES + held + t, mask=t < count, other=0.0), tl.load(decay + 2 * PLACES)
            other = projected + token * projected_stride
            beta = sigmoid(tl.load(other + B + head).to(tl.float32))
            v = tl.load(heads + token * width + 2 * key_width + head * VALUE_DIM + d, mask=in_value, other=0.0)
            put = row_at(
                tail, (behind + held + t) % RING * VALUE_HEADS + head, delta_stride, t < count, DELTA_FIRST, DELTA_EACH,
                VALUE_DIM,
            )  # fmt: skip
            far_k, far_q = tl.zeros([BLOCK_V], tl.float32), tl.zeros([BLOCK_V], tl.float32)
            for piece in tl.range(pieces, num_stages=1, disable_licm=True):
                c = piece * PIECE + tl.arange(0, PIECE)
                state = read_piece(
                    states, base_blocks, head, piece, d, has, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM,
                    PIECE,
                )  # fmt: skip
                q = tl.load(made + c, mask=c < KEY_DIM, other=0.0)
                k = tl.load(made + key_width + c, mask=c < KEY_DIM, other=0.0)
                far_k += tl.sum(state * k[:, None], 0)
                far_q += tl.sum(state * q[:, None], 0)
                if t == fold_at:
                    state = folded(
                        state, tl.load(of_fold + PLACES + 1), of_fold, settled, behind, head, key_head, c, d, tail,
                        keys, deltas, key_stride, delta_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING,
                        KEY_FIRST, KEY_EACH, DELTA_FIRST, DELTA_EACH, FOLD,
                    )  # fmt: skip
                    write_piece(
                        state, states, left, head, piece, d, in_value, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM,
                        VALUE_DIM, PIECE,
                    )  # fmt: skip
            if t < count:
                u = (beta * (v - far_k * far - near_k)).to(deltas.dtype.element_ty)
                o = far_q * far + near_q + u.to(tl.float32) * own_q
                o = gated_norm(
                    o.to(out.dtype.element_ty), norm, other + Z + head * VALUE_DIM, d, eps, VALUE_DIM, SIGMOID
                )
                result = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + d
                tl.store(result, o.to(out.dtype.element_ty), mask=in_value)
                tl.store(deltas + put + d, u, mask=in_value)
            if (count > 1) | late:
                tl.debug_barrier()  # further tokens and a fold read u


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
    places = max(16, next_power_of_2(shape.ring))
    made = launch_delta_inputs(projected, weights, shape, cache, meta, places)
    launch_states(*made, projected, weights, shape, cache, meta, out, tuning)


def launch_states(
    heads: Tensor,
    dots: Tensor,
    decays: Tensor,
    projected: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: StatePages,
    meta: StateMeta,
    out: Tensor,
    tuning: dict[str, Any] | None = None,
) -> None:
    """Launches delta_step_kernel with the results of delta_inputs."""
    views, (runs_stride, *strides, _), found = places_of(cache, meta)
    _, z, b, _, _ = shape.columns
    options = {**step_options(shape, len(meta.base)), **(tuning or {})}
    if not in_sixteens(cache.pages, *(place.width * place.dtype.itemsize for place in (cache.state[0], cache.tail[1]))):
        options["FETCH"] = 0
    found = {name: number for name, number in found.items() if not name.startswith("GATE")}
    delta_step_kernel[shape.value_heads, len(meta.base)](
        out, heads, dots, decays, projected, weights.norm, *views[:3], meta.runs, meta.base_run, meta.write_run,
        meta.tail_run, meta.base, meta.new_base, meta.start, meta.query_start, meta.checkpoint_run, shape.eps,
        runs_stride, projected.stride(0), *strides, KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, Z=z, B=b, SIGMOID=shape.sigmoid, RING=shape.ring, **found,
        PLACES=dots.shape[-1],
        BLOCK_V=next_power_of_2(shape.value_dim), **options, **launch_options(),
    )  # fmt: skip


def step_options(shape: DeltaShape, rows: int) -> dict[str, Any]:
    """How a program reads its state; counted for an H200 and heads of 128 x 128.

    Many programs are one warp each, because a sum over channels then needs no other warp; 11 of them fit in a unit.
    What all programs that run at once fetch is to fit in L2.
    """
    programs, units = shape.value_heads * rows, target().num_units
    few = programs <= 2 * units
    options = {"num_warps": 4, "FETCH": 128} if few else {"num_warps": 1, "FETCH": 64 if programs <= 8 * units else 32}
    if not few and target().bounds_registers:
        options["maxnreg"] = 184
    most, columns = next_power_of_2(shape.key_dim), next_power_of_2(shape.value_dim)
    piece = min(most, max(8, (1 << 13 if few else 1 << 11) // columns))
    return {**options, "PIECE": piece, "LINES": 16, "FOLD": 4 if few else 8}
