"""Writes the states that a scan leaves: at the new base and at checkpoints, also if they lie within a chunk.

In: the state before a chunk, and the keys, changes and sums of gates of the chunk's positions. A scan stores states and
changes transposed, columns first: a product then has so few rows that one warp's matrix instruction computes it, and
the result of one product is the operand of the next without leaving registers. Users: delta_scan, ssd_scan.
"""

from __future__ import annotations

from engine.kernels.state.runs import CHECKPOINTS, decay_between, row_at
from engine.kernels.target import tl, triton


@triton.jit
def store_state(
    state, run, states, runs, head, d, runs_stride, state_stride, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FIRST: tl.constexpr, EACH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Stores columns d of a head's state into a run; state [columns, BLOCK_K]."""
    c = tl.arange(0, BLOCK_K)
    blocks = runs + run.to(tl.int64) * runs_stride
    at = row_at(blocks, head * KEY_DIM + c, state_stride, c < KEY_DIM, FIRST, EACH, VALUE_DIM)
    whole = (d < VALUE_DIM)[:, None] & (c < KEY_DIM)[None, :]
    tl.store(states + at[None, :] + d[:, None], state.to(states.dtype.element_ty), mask=whole)


@triton.jit
def three_parts(values):
    """values float32 as a sum of three in bfloat16, the smallest first."""
    high = values.to(tl.bfloat16)
    rest = values - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return (rest - middle.to(tl.float32)).to(tl.bfloat16), middle, high


@triton.jit
def exact_product(change, keys):
    """change [columns, LANES] float32 @ keys [LANES, BLOCK_K], as accurate as float32: bfloat16 in three parts."""
    if keys.dtype == tl.bfloat16:
        low, middle, high = three_parts(change)
        return tl.dot(low, keys) + tl.dot(middle, keys) + tl.dot(high, keys)
    else:
        return tl.dot(change, keys.to(tl.float32), input_precision="ieee")


@triton.jit
def exact_rows(keys, change):
    """keys [rows, LANES] @ change [LANES, columns] float32, as accurate as float32; see exact_product."""
    if keys.dtype == tl.bfloat16:
        low, middle, high = three_parts(change)
        return tl.dot(keys, low) + tl.dot(keys, middle) + tl.dot(keys, high)
    else:
        return tl.dot(keys.to(tl.float32), change, input_precision="ieee")


@triton.jit
def write_states(
    state, keys, change, level, begin, end, row, states, runs, write_run, new_base, checkpoint_run, checkpoint_at,
    head, d, runs_stride, state_stride, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, FIRST: tl.constexpr,
    EACH: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Writes each state that is due after begin + 1..end tokens; `state` is the state after `begin` tokens.

    keys [LANES, BLOCK_K], change [columns, LANES] and level [LANES] (sums of gates): of the positions from `begin` on.
    """
    i = tl.arange(0, LANES)
    for number in range(CHECKPOINTS + 1):
        if number == CHECKPOINTS:
            run, at = tl.load(write_run + row), tl.load(new_base + row)
        else:
            run = tl.load(checkpoint_run + row * CHECKPOINTS + number)
            at = tl.load(checkpoint_at + row * CHECKPOINTS + number)
        if (run > 0) & (at > begin) & (at <= end):
            last = tl.sum(tl.where(i == at - begin - 1, level, 0.0), 0)
            part = change * decay_between(last, level, i < at - begin)[None, :]
            if EXACT:
                found = state * tl.exp(last) + exact_product(part, keys)
            else:
                found = state * tl.exp(last) + tl.dot(part.to(keys.dtype), keys, input_precision="ieee")
            store_state(
                found, run, states, runs, head, d, runs_stride, state_stride, KEY_DIM, VALUE_DIM, FIRST, EACH, BLOCK_K
            )


@triton.jit
def ends_of(row, write_run, new_base, checkpoint_run, checkpoint_at):
    """[2 * CHECKPOINTS]: the numbers of tokens after which the row's states are due, 0 for none; for `any_between`."""
    lane = tl.arange(0, 2 * CHECKPOINTS)
    checked = lane < tl.where(tl.load(checkpoint_run + row * CHECKPOINTS) > 0, CHECKPOINTS, 0)
    run = tl.load(checkpoint_run + row * CHECKPOINTS + lane, mask=checked, other=0)
    at = tl.load(checkpoint_at + row * CHECKPOINTS + lane, mask=checked & (run > 0), other=0)
    last = tl.where(tl.load(write_run + row) > 0, tl.load(new_base + row), 0)
    return tl.where(lane == CHECKPOINTS, last, at)


@triton.jit
def any_between(ends, begin, end):
    """True if a state is due after begin + 1..end tokens."""
    return tl.sum(((ends > begin) & (ends <= end)).to(tl.int32), 0) > 0


@triton.jit
def store_due(
    state, ends, begin, end, row, states, runs, write_run, new_base, checkpoint_run, checkpoint_at, head, d,
    runs_stride, state_stride, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rounds the state after `end` tokens to the dtype of `states`, writes it where it is due, returns it as float32.

    `ends`: from `ends_of`; `begin`: where the chunk that ends here began.
    """
    rounded = state.to(states.dtype.element_ty)
    if any_between(ends, begin, end):
        for number in range(CHECKPOINTS + 1):
            if number == CHECKPOINTS:
                run, at = tl.load(write_run + row), tl.load(new_base + row)
            else:
                run = tl.load(checkpoint_run + row * CHECKPOINTS + number)
                at = tl.load(checkpoint_at + row * CHECKPOINTS + number)
            if (run > 0) & (at == end):
                store_state(
                    rounded, run, states, runs, head, d, runs_stride, state_stride, KEY_DIM, VALUE_DIM, FIRST, EACH,
                    BLOCK_K,
                )  # fmt: skip
    return rounded.to(tl.float32)
