"""Device functions that fold positions into a state of the gated delta rule: the state at a row's new base.

    S' = e^{G_n} S + sum over j < n of e^{G_n - G_j} k_j u_j^T        G: sums of gates from the base on; n: positions

A fold of positions before the step needs only what earlier steps wrote. So programs of their own compute such folds
before the wait (kernels/pdl), while delta_inputs and the products before it run, and every load bypasses the unit's
cache. Several programs share the pieces of a head. They also write the inputs before the new base. A fold that takes
in the step's own tokens is computed by the row's program with the same functions. Users: delta_step.

A piece is no product on matrix units, whose operands would need shared memory: then fewer programs fit in a unit, and
programs of delta_inputs and of the step do not run at once if the unit divides its memory differently for them.
"""

from __future__ import annotations

from engine.kernels.state.runs import input_row, piece_at, plan_of, row_at, run_of
from engine.kernels.target import tl, triton

LANES = tl.constexpr(256)  # rows whose plans a program reads at once
COLUMNS = tl.constexpr(128)  # inputs that a program copies at once


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
def gates_of(
    gates, tail, behind, settled, head, gate_stride, VALUE_HEADS: tl.constexpr, RING: tl.constexpr,
    GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Gates of a head at `settled` positions after the base [PLACES], then zeros."""
    i = tl.arange(0, PLACES)
    at = row_at(tail, (behind + i) % RING, gate_stride, i < settled, GATE_FIRST, GATE_EACH, VALUE_HEADS, True)
    return tl.load(gates + at + head, mask=i < settled, other=0.0, cache_modifier=".cg")


@triton.jit
def add_changes(
    state, keys, deltas, gate, tail, behind, settled, head, c, d, key_stride, delta_stride, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RING: tl.constexpr,
    KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr,
    PLACES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Adds e^{G_n - G_j} k_j u_j^T of `settled` positions to channels c of a state; loads of FOLD positions overlap."""
    i, shares = tl.arange(0, PLACES), VALUE_HEADS // KEY_HEADS
    for j in tl.range(0, settled, num_stages=1, disable_licm=True, loop_unroll_factor=FOLD):
        slot, seen = (behind + j) % RING, j < settled
        at = row_at(tail, slot, key_stride, seen, KEY_FIRST, KEY_EACH, KEY_HEADS * KEY_DIM, True)
        at += head // shares * KEY_DIM
        key = tl.load(keys + at + c, mask=c < KEY_DIM, other=0.0, cache_modifier=".cg").to(tl.float32)
        at = row_at(tail, slot * VALUE_HEADS + head, delta_stride, seen, DELTA_FIRST, DELTA_EACH, VALUE_DIM, True)
        u = tl.load(deltas + at + d, mask=d < VALUE_DIM, other=0.0, cache_modifier=".cg").to(tl.float32)
        u *= tl.exp(tl.sum(tl.where(i > j, gate, 0.0), 0))
        state += key[:, None] * u[None, :]
    return state


@triton.jit
def fold_piece(
    state, piece, d, gate, states, keys, deltas, left, tail, behind, settled, head, state_stride, key_stride,
    delta_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr,
    KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr, PLACES: tl.constexpr,
    PIECE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Folds `settled` positions into a piece of a head's state [PIECE, columns d]; writes it into the run `left`."""
    state = add_changes(
        state * tl.exp(tl.sum(gate, 0)), keys, deltas, gate, tail, behind, settled, head,
        piece * PIECE + tl.arange(0, PIECE), d, key_stride, delta_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        RING, KEY_FIRST, KEY_EACH, DELTA_FIRST, DELTA_EACH, PLACES, FOLD,
    )  # fmt: skip
    place, lanes = piece_of(
        left, head, piece, d, d < VALUE_DIM, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM, PIECE, True
    )
    tl.store(states + place, state.to(states.dtype.element_ty), mask=lanes)


@triton.jit
def fold_pieces(
    states, keys, deltas, gates, base_blocks, left, tail, behind, settled, head, begin, end, d, state_stride,
    key_stride, delta_stride, gate_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr,
    KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr,
    GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr, PLACES: tl.constexpr, FOLD_C: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """Writes pieces begin..end - 1, FOLD_C channels each, of columns d of a head's state into the run `left`."""
    gate = gates_of(gates, tail, behind, settled, head, gate_stride, VALUE_HEADS, RING, GATE_FIRST, GATE_EACH, PLACES)
    has = d < tl.where(behind > 0, VALUE_DIM, 0)
    for piece in tl.range(begin, end, num_stages=1, disable_licm=True):
        place, lanes = piece_of(
            base_blocks, head, piece, d, has, state_stride, STATE_FIRST, STATE_EACH, KEY_DIM, VALUE_DIM, FOLD_C, True
        )
        state = tl.load(states + place, mask=lanes, other=0.0, cache_modifier=".cg").to(tl.float32)
        fold_piece(
            state, piece, d, gate, states, keys, deltas, left, tail, behind, settled, head, state_stride, key_stride,
            delta_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, STATE_FIRST, STATE_EACH, KEY_FIRST,
            KEY_EACH, DELTA_FIRST, DELTA_EACH, PLACES, FOLD_C, FOLD,
        )  # fmt: skip


@triton.jit
def copy_inputs(
    number, programs, end, begin, behind, first, projected, keys, base_blocks, left, tail, projected_stride,
    key_stride, WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr, BEFORE_FIRST: tl.constexpr,
    INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr,
):  # fmt: skip
    """Writes the TAPS - 1 inputs before position `end` into the run `left`; `programs` programs share the columns.

    `begin`: the position of the row's token `first`.
    """
    for column in tl.range(number * COLUMNS, WIDTH, programs * COLUMNS, num_stages=1):
        w = column + tl.arange(0, COLUMNS)
        found = ()
        for tap in tl.static_range(1, TAPS):
            source = input_row(
                end - tap, begin, behind, first, projected, keys, base_blocks, tail, projected_stride, key_stride,
                WIDTH, RING, TAPS, BEFORE_FIRST, INPUT_FIRST, INPUT_EACH, True,
            )  # fmt: skip
            found += (tl.load(source + w, mask=w < tl.where(end >= tap, WIDTH, 0), other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        for tap in tl.static_range(1, TAPS):
            target = row_at(left, TAPS - 1 - tap, key_stride, True, BEFORE_FIRST, INPUT_EACH, WIDTH, True)
            tl.store(keys + target + w, found[tap - 1], mask=w < WIDTH)


@triton.jit
def fold_rows(
    slot, slots, part, parts, rows, projected, states, keys, deltas, gates, runs, base_run, write_run, tail_run, base,
    new_base, start, query_start, checkpoint_run, head, runs_stride, projected_stride, state_stride, key_stride,
    delta_stride, gate_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr, STATE_FIRST: tl.constexpr,
    STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr, DELTA_FIRST: tl.constexpr,
    DELTA_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr, BEFORE_FIRST: tl.constexpr,
    INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr, PLACES: tl.constexpr, FOLD_C: tl.constexpr,
    FOLD_V: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Folds one part of one head, for each row that a slot gets: every slots-th row that has a new base."""
    width: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    across: tl.constexpr = (VALUE_DIM + FOLD_V - 1) // FOLD_V
    pieces: tl.constexpr = (KEY_DIM + FOLD_C - 1) // FOLD_C
    each = tl.cdiv(pieces, parts // across)
    begin, d = part // across * each, part % across * FOLD_V + tl.arange(0, FOLD_V)
    passed = 0
    for top in tl.range(0, rows, LANES, num_stages=1):
        lane = top + tl.arange(0, LANES)
        old = tl.load(base + lane, mask=lane < rows, other=0, cache_modifier=".cg")
        moves = tl.load(new_base + lane, mask=lane < rows, other=0, cache_modifier=".cg") > old
        rank = passed + tl.cumsum(moves.to(tl.int32), 0)
        end = passed + tl.sum(moves.to(tl.int32), 0)
        for number in tl.range(passed + (slot - passed % slots + slots) % slots, end, slots, num_stages=1):
            row = tl.sum(tl.where(moves & (rank == number + 1), lane, 0), 0)
            first, _, behind, settled, held, base_blocks, tail, short = plan_of(
                row, runs, base_run, tail_run, base, new_base, start, query_start, checkpoint_run, runs_stride, RING
            )
            if short & (settled <= held):
                left = run_of(runs, write_run, row, runs_stride, True, True)
                fold_pieces(
                    states, keys, deltas, gates, base_blocks, left, tail, behind, settled, head, begin,
                    tl.minimum(begin + each, pieces), d, state_stride, key_stride, delta_stride, gate_stride, KEY_HEADS,
                    VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, STATE_FIRST, STATE_EACH, KEY_FIRST, KEY_EACH, DELTA_FIRST,
                    DELTA_EACH, GATE_FIRST, GATE_EACH, PLACES, FOLD_C, FOLD,
                )  # fmt: skip
                copy_inputs(
                    head * parts + part, VALUE_HEADS * parts, behind + settled, behind + held, behind, first, projected,
                    keys, base_blocks, left, tail, projected_stride, key_stride, width, RING, TAPS, BEFORE_FIRST,
                    INPUT_FIRST, INPUT_EACH,
                )  # fmt: skip
        passed = end


@triton.jit
def end_fold(
    row, head, projected, states, keys, deltas, gates, runs, write_run, base_blocks, tail, first, behind, settled, held,
    runs_stride, projected_stride, state_stride, key_stride, delta_stride, gate_stride, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr,
    STATE_FIRST: tl.constexpr, STATE_EACH: tl.constexpr, KEY_FIRST: tl.constexpr, KEY_EACH: tl.constexpr,
    DELTA_FIRST: tl.constexpr, DELTA_EACH: tl.constexpr, GATE_FIRST: tl.constexpr, GATE_EACH: tl.constexpr,
    BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr, INPUT_EACH: tl.constexpr, PLACES: tl.constexpr,
    FOLD_C: tl.constexpr, FOLD_V: tl.constexpr,
):  # fmt: skip
    """Ends the fold of a head after its row's tokens: copies inputs, and folds if the step's own tokens are folded too.

    Few loads overlap, because few rows fold here."""
    left = run_of(runs, write_run, row, runs_stride, True)
    for column in tl.range(0, tl.where(settled > held, VALUE_DIM, 0), FOLD_V, num_stages=1):
        fold_pieces(
            states, keys, deltas, gates, base_blocks, left, tail, behind, settled, head, 0,
            (KEY_DIM + FOLD_C - 1) // FOLD_C, column + tl.arange(0, FOLD_V), state_stride, key_stride, delta_stride,
            gate_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, STATE_FIRST, STATE_EACH, KEY_FIRST,
            KEY_EACH, DELTA_FIRST, DELTA_EACH, GATE_FIRST, GATE_EACH, PLACES, FOLD_C, 4,
        )  # fmt: skip
    copy_inputs(
        head, VALUE_HEADS, behind + settled, behind + held, behind, first, projected, keys, base_blocks, left, tail,
        projected_stride, key_stride, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, RING, TAPS, BEFORE_FIRST,
        INPUT_FIRST, INPUT_EACH,
    )  # fmt: skip
