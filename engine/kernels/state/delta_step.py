"""Triton kernel of one step of the gated delta rule for short rows: positions after the base fit in the ring.

A program computes one value head of one row. It reads the state once, PIECE channels of the key at a time; a channel is
contiguous in memory. It also reads u from the tail, and the terms of each token from delta_inputs, and computes:

    o_t = e^{G_t} S q_t + sum over j <= t of e^{G_t - G_j} (k_j.q_t) u_j        G: sums of gates from the base on
    u_t = beta (v_t - e^{G_t} S k_t - sum over j < t of e^{G_t - G_j} (k_j.k_t) u_j)

u goes into the tail; o is normalised, gated and written to `out`. If a row has several tokens, the program reads the
state once for each. While the program waits for delta_inputs, the first rows of the state and u come into L2.

If the step leaves a later base, the state at that base is written too (delta_fold). If all programs run at once, the
first programs of the grid do that: they find the rows that fold, `slots` rows at once, and divide each head into
`parts`; if no row folds, they read the bases and end. Of more rows, a row's program does it while it reads the state,
because by then other programs wait for its place. If the new base lies behind the step's first position, the row's
program folds behind its last token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.pdl import fetch_run, grid_wait, launch_options, let_next_start
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_fold import end_fold, fold_piece, fold_rows, gates_of, piece_of
from engine.kernels.state.delta_inputs import in_sixteens, launch_delta_inputs
from engine.kernels.state.runs import plan_of, row_at, run_of, sigmoid
from engine.kernels.target import target, tl, triton


@triton.jit
def read_piece(
    states, blocks, head, piece, d, has, state_stride, FIRST: tl.constexpr, EACH: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """A piece of a head's state."""
    place, lanes = piece_of(blocks, head, piece, d, has, state_stride, FIRST, EACH, KEY_DIM, VALUE_DIM, PIECE, EARLY)
    return tl.load(states + place, mask=lanes, other=0.0, cache_modifier=".cg" if EARLY else "")


@triton.jit
def read_changes(
    deltas, tail, begin, held, behind, head, d, in_value, delta_stride, VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr, LINES: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """u of positions begin..begin + LINES - 1 after the base, of those below `held` [LINES, columns]."""
    j = begin + tl.arange(0, LINES)
    at = row_at(tail, (behind + j) % RING * VALUE_HEADS + head, delta_stride, j < held, FIRST, EACH, VALUE_DIM, EARLY)
    seen = (j < held)[:, None] & in_value[None, :]
    return tl.load(deltas + at[:, None] + d[None, :], mask=seen, other=0.0, cache_modifier=".cg" if EARLY else "")


@triton.jit
def fetch_rows(
    pages, blocks, line, there, page_stride, FIRST: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Starts copies of rows of a part into L2, before grid_wait; rows of whole 16 bytes."""
    size: tl.constexpr = WIDTH * pages.dtype.element_ty.primitive_bitwidth // 8
    fetch_run(pages + row_at(blocks, line, page_stride, there, FIRST, EACH, WIDTH, True), tl.where(there, size, 0))


@triton.jit
def near_sums(near_k, near_q, u, begin, held, weights, decays, PLACES: tl.constexpr, LINES: tl.constexpr):
    """Adds decayed u [LINES, columns] from position `begin` on times k_j.k_t and k_j.q_t to sums [columns]."""
    j = begin + tl.arange(0, LINES)
    seen, u = j < held, u.to(tl.float32)
    decay = tl.load(decays + j, mask=seen, other=0.0)
    near_k += tl.sum(u * (tl.load(weights + j, mask=seen, other=0.0) * decay)[:, None], 0)
    return near_k, near_q + tl.sum(u * (tl.load(weights + PLACES + j, mask=seen, other=0.0) * decay)[:, None], 0)


@triton.jit
def near_terms(
    u, deltas, tail, behind, held, head, d, in_value, weights, decays, delta_stride, VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr, PLACES: tl.constexpr,
    LINES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`near_sums` of `held` positions after the base; u: the first LINES of these, if loads precede the wait."""
    near_k, near_q = tl.zeros(d.shape, tl.float32), tl.zeros(d.shape, tl.float32)
    if AHEAD:
        near_k, near_q = near_sums(near_k, near_q, u, 0, held, weights, decays, PLACES, LINES)
    for begin in tl.range(LINES if AHEAD else 0, held, LINES, num_stages=1, disable_licm=True):
        further = read_changes(
            deltas, tail, begin, held, behind, head, d, in_value, delta_stride, VALUE_HEADS, VALUE_DIM, RING, FIRST,
            EACH, LINES,
        )  # fmt: skip
        near_k, near_q = near_sums(near_k, near_q, further, begin, held, weights, decays, PLACES, LINES)
    return near_k, near_q


@triton.jit
def far_terms(
    state, t, more, made, states, keys, deltas, gate, left, base_blocks, tail, behind, folds, head, d, has,
    state_stride, key_stride, delta_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr,
    KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr,
    PLACES: tl.constexpr, PIECE: tl.constexpr, FOLD: tl.constexpr, INLINE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """S k_t and S q_t [columns] without decay, and a piece. INLINE: folds `folds` positions too, at t = 0.

    If a piece is loaded before the wait, it is `state`, and each next piece is loaded before one is used; returns the
    first piece again for the next token, if there is a next token (`more`).
    """
    pieces: tl.constexpr = (KEY_DIM + PIECE - 1) // PIECE
    far_k, far_q = tl.zeros(d.shape, tl.float32), tl.zeros(d.shape, tl.float32)
    for piece in tl.range(pieces, num_stages=1, disable_licm=True):
        c = piece * PIECE + tl.arange(0, PIECE)
        if AHEAD:
            numbers = state.to(tl.float32)
        else:
            numbers = read_piece(
                states, base_blocks, head, piece, d, has, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM,
                PIECE,
            ).to(tl.float32)  # fmt: skip
        q = tl.load(made + c, mask=c < KEY_DIM, other=0.0)
        k = tl.load(made + KEY_HEADS * KEY_DIM + c, mask=c < KEY_DIM, other=0.0)
        far_k += tl.sum(numbers * k[:, None], 0)
        far_q += tl.sum(numbers * q[:, None], 0)
        if INLINE:
            due = (t == 0) & (folds > 0)
            if due:
                fold_piece(
                    numbers, piece, d, gate, states, keys, deltas, left, tail, behind, folds, head, state_stride,
                    key_stride, delta_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, STATE_FIRST, STATE_EACH,
                    KEY_FIRST, KEY_EACH, DELTA_FIRST, DELTA_EACH, PLACES, PIECE, FOLD,
                )  # fmt: skip
        if AHEAD:
            state = read_piece(
                states, base_blocks, head, (piece + 1) % pieces, d, has & (more | (piece + 1 < pieces)), state_stride,
                STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM, PIECE,
            )  # fmt: skip
    return far_k, far_q, state


@triton.jit
def gated_norm(o, norm, z, d, eps, VALUE_DIM: tl.constexpr, SIGMOID: tl.constexpr):
    """norm(o) times z's activation, float32 [columns]."""
    o, gate = o.to(tl.float32), tl.load(z + d, mask=d < VALUE_DIM, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 0) / VALUE_DIM + eps) * tl.load(norm + d, mask=d < VALUE_DIM, other=0.0)
    return o * (sigmoid(gate) * (1.0 if SIGMOID else gate))


@triton.jit
def step_row(
    row, head, out, heads, dots, decays, projected, norm, states, keys, deltas, gates, runs, base_run, write_run,
    tail_run, base, new_base, start, query_start, checkpoint_run, eps, runs_stride, projected_stride, state_stride,
    key_stride, delta_stride, gate_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, Z: tl.constexpr, B: tl.constexpr, SIGMOID: tl.constexpr, RING: tl.constexpr,
    TAPS: tl.constexpr, STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr,
    KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr, GATE_FIRST: tl.constexpr,
    GATE_EACH: tl.constexpr, BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
    PLACES: tl.constexpr, LINES: tl.constexpr, PIECE: tl.constexpr, BLOCK_V: tl.constexpr, FOLD_C: tl.constexpr,
    FOLD_V: tl.constexpr, FOLD: tl.constexpr, INLINE: tl.constexpr, FETCH: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes one value head of one row."""
    key_width: tl.constexpr = KEY_HEADS * KEY_DIM
    width: tl.constexpr = 2 * key_width + VALUE_HEADS * VALUE_DIM
    first, count, behind, settled, held, base_blocks, tail, short = plan_of(
        row, runs, base_run, tail_run, base, new_base, start, query_start, checkpoint_run, runs_stride, RING
    )
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
    u, state, gate, left, folds = 0.0, 0.0, 0.0, runs, 0  # for variants that do without
    if AHEAD:
        u = read_changes(
            deltas, tail, 0, tl.where(short, held, 0), behind, head, d, in_value, delta_stride, VALUE_HEADS, VALUE_DIM,
            RING, DELTA_FIRST, DELTA_EACH, LINES, True,
        )  # fmt: skip
        state = read_piece(
            states, base_blocks, head, 0, d, has, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM, PIECE, True
        )
    grid_wait(OVERLAP)
    if INLINE:
        folds, left = tl.where(short & (settled <= held), settled, 0), run_of(runs, write_run, row, runs_stride, True)
        gate = gates_of(
            gates, tail, behind, folds, head, gate_stride, VALUE_HEADS, RING, GATE_FIRST, GATE_EACH, PLACES
        )  # fmt: skip
    if short:
        late = settled > held  # the step's own tokens are folded too
        for t in tl.range(count, disable_licm=True):
            token = (first + t).to(tl.int64)
            made = heads + token * width + key_head * KEY_DIM
            weights = dots + (token * KEY_HEADS + key_head) * (2 * PLACES)
            decay = decays + (token * VALUE_HEADS + head) * (2 * PLACES)
            own_q, far = tl.load(weights + PLACES + held + t), tl.load(decay + PLACES)
            other = projected + token * projected_stride
            beta = sigmoid(tl.load(other + B + head).to(tl.float32))
            v = tl.load(heads + token * width + 2 * key_width + head * VALUE_DIM + d, mask=in_value, other=0.0)
            near_k, near_q = near_terms(
                u, deltas, tail, behind, held + t, head, d, in_value, weights, decay, delta_stride, VALUE_HEADS,
                VALUE_DIM, RING, DELTA_FIRST, DELTA_EACH, PLACES, LINES, AHEAD,
            )  # fmt: skip
            more = t + 1 < count
            far_k, far_q, after = far_terms(
                state, t, more, made, states, keys, deltas, gate, left, base_blocks, tail, behind, folds, head, d, has,
                state_stride, key_stride, delta_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, STATE_FIRST,
                STATE_EACH, KEY_FIRST, KEY_EACH, DELTA_FIRST, DELTA_EACH, PLACES, PIECE, FOLD, INLINE, AHEAD,
            )  # fmt: skip
            rounded = (beta * (v - far_k * far - near_k)).to(deltas.dtype.element_ty)
            o = far_q * far + near_q + rounded.to(tl.float32) * own_q
            o = gated_norm(o.to(out.dtype.element_ty), norm, other + Z + head * VALUE_DIM, d, eps, VALUE_DIM, SIGMOID)
            result = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + d
            tl.store(result, o.to(out.dtype.element_ty), mask=in_value)
            own = (behind + held + t) % RING * VALUE_HEADS + head
            put = row_at(tail, own, delta_stride, True, DELTA_FIRST, DELTA_EACH, VALUE_DIM)
            tl.store(deltas + put + d, rounded, mask=in_value)
            if (count > 1) | late:
                tl.debug_barrier()  # further tokens and a fold read u
            if AHEAD:
                u = read_changes(
                    deltas, tail, 0, tl.where(more, held + t + 1, 0), behind, head, d, in_value, delta_stride,
                    VALUE_HEADS, VALUE_DIM, RING, DELTA_FIRST, DELTA_EACH, LINES,
                )  # fmt: skip
                state = after
        if settled > tl.where(INLINE, 0, held):
            end_fold(
                row, head, projected, states, keys, deltas, gates, runs, write_run, base_blocks, tail, first, behind,
                settled, held, runs_stride, projected_stride, state_stride, key_stride, delta_stride, gate_stride,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, TAPS, STATE_FIRST, STATE_EACH, KEY_FIRST, KEY_EACH,
                DELTA_FIRST, DELTA_EACH, GATE_FIRST, GATE_EACH, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH, PLACES, FOLD_C,
                FOLD_V,
            )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "parts"])
def delta_step_kernel(
    out,  # [T, VALUE_HEADS * VALUE_DIM]
    heads,  # [T, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM] float32
    dots,  # [T, KEY_HEADS, 2, PLACES] float32
    decays,  # [T, VALUE_HEADS, 2, PLACES] float32
    projected,  # [T, q | k | v | z | b | a]
    norm,  # [VALUE_DIM]
    states, keys, deltas, gates,  # the pages in the dtypes of these parts; inputs have the dtype of keys
    runs, base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run,
    eps,
    slots,  # rows that are folded at once
    parts,  # programs per head of a fold
    runs_stride, projected_stride, state_stride, key_stride, delta_stride, gate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    Z: tl.constexpr, B: tl.constexpr,  # columns of `projected`
    SIGMOID: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr,
    DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr,
    BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
    PLACES: tl.constexpr,  # power of two >= RING
    LINES: tl.constexpr,  # positions whose u is loaded at once
    PIECE: tl.constexpr, BLOCK_V: tl.constexpr,
    FOLD_C: tl.constexpr, FOLD_V: tl.constexpr,  # channels and columns that a program folds at once
    FOLD: tl.constexpr,  # positions whose loads overlap in a fold
    INLINE: tl.constexpr,  # the row's program folds while it reads the state; there are no slots
    FETCH: tl.constexpr,  # rows of the state that come into L2 before the wait, a power of two; 0: none, nor u
    AHEAD: tl.constexpr,  # whether the first u and the first piece of the state are loaded before the wait
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes one value head of one row; the first slots * parts programs of a head fold."""
    head, number = tl.program_id(0), tl.program_id(1)
    row = number - slots * parts
    if not INLINE:
        early = row < 0
        if early:
            let_next_start(OVERLAP)
            fold_rows(
                number // parts, slots, number % parts, parts, tl.num_programs(1) - slots * parts, projected, states,
                keys, deltas, gates, runs, base_run, write_run, tail_run, base, new_base, start, query_start,
                checkpoint_run, head, runs_stride, projected_stride, state_stride, key_stride, delta_stride,
                gate_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, TAPS, STATE_FIRST, STATE_EACH,
                KEY_FIRST, KEY_EACH, DELTA_FIRST, DELTA_EACH, GATE_FIRST, GATE_EACH, BEFORE_FIRST, INPUT_FIRST,
                INPUT_EACH, PLACES, FOLD_C, FOLD_V, FOLD,
            )  # fmt: skip
    if row >= 0:
        step_row(
            row, head, out, heads, dots, decays, projected, norm, states, keys, deltas, gates, runs, base_run,
            write_run, tail_run, base, new_base, start, query_start, checkpoint_run, eps, runs_stride,
            projected_stride, state_stride, key_stride, delta_stride, gate_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM,
            VALUE_DIM, Z, B, SIGMOID, RING, TAPS, STATE_FIRST, STATE_EACH, KEY_FIRST, KEY_EACH, DELTA_FIRST,
            DELTA_EACH, GATE_FIRST, GATE_EACH, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH, PLACES, LINES, PIECE, BLOCK_V,
            FOLD_C, FOLD_V, FOLD, INLINE, FETCH, AHEAD, OVERLAP,
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
    views, strides, found = places_of(cache, meta)
    (_, _, _, inputs), before = cache.tail, cache.state[-1]
    _, z, b, _, _ = shape.columns
    options = {**step_options(shape, len(meta.base)), **(tuning or {})}
    if not in_sixteens(cache.pages, *(place.width * place.dtype.itemsize for place in (cache.state[0], cache.tail[1]))):
        options["FETCH"] = 0
    delta_step_kernel[shape.value_heads, options["slots"] * options["parts"] + len(meta.base)](
        out, heads, dots, decays, projected, weights.norm, *views, meta.runs, meta.base_run, meta.write_run,
        meta.tail_run, meta.base, meta.new_base, meta.start, meta.query_start, meta.checkpoint_run, shape.eps,
        options.pop("slots"), options.pop("parts"), strides[0], projected.stride(0), *strides[1:],
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        Z=z, B=b, SIGMOID=shape.sigmoid, RING=shape.ring, TAPS=shape.taps, **found, BEFORE_FIRST=before.first,
        INPUT_FIRST=inputs.first, INPUT_EACH=inputs.per_page, PLACES=dots.shape[-1],
        BLOCK_V=triton.next_power_of_2(shape.value_dim), **options, **launch_options(),
    )  # fmt: skip


def step_options(shape: DeltaShape, rows: int) -> dict[str, Any]:
    """How programs read and fold states; measured on an H200 with heads of 128 x 128.

    Many programs are one warp each, because a sum over channels then needs no other warp; 11 of them fit in a unit. If
    all programs run at once, 8 in a unit, each has registers for a piece of twice the size. What all programs that run
    at once fetch is to fit in L2. Programs that fold are less than a wave, so that they cost little if no row folds.
    """
    programs, units = shape.value_heads * rows, target().num_units
    few, wave = programs <= 2 * units, programs <= 8 * units
    most, columns = triton.next_power_of_2(shape.key_dim), triton.next_power_of_2(shape.value_dim)
    numbers = 1 << (13 if few else 12 if wave else 11)
    options = {"num_warps": 4 if few else 1, "FETCH": 128 if few else 64 if wave else 32, "INLINE": not wave}
    options |= {"PIECE": min(most, max(8, numbers // columns)), "LINES": 16, "AHEAD": few}
    if target().bounds_registers:
        options["maxnreg"] = 168 if few else 255 if wave else 184
    options |= {"FOLD_C": min(most, 32 if few else 16), "FOLD_V": min(columns, 64), "FOLD": 8 if wave else 4}
    if not wave:
        return {**options, "slots": 0, "parts": 1}
    slots = max(1, rows // 4) if few else min(16, triton.cdiv(rows, 8))
    across = triton.cdiv(shape.value_dim, options["FOLD_V"])
    share = (2 if few else 4) * units // (shape.value_heads * slots * across)
    return {**options, "slots": slots, "parts": across * max(1, min(most // options["FOLD_C"], share))}
