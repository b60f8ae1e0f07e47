"""States that a scan leaves on its way: behind a new base, and at checkpoints, which may lie within a chunk.

In: the state before a chunk, and the keys, changes and sums of gates of its positions. A scan has states and changes
turned, columns first: a product of so few rows takes a warp's matrix instruction, and what one product makes is the
next one's operand as it lies in registers. Users: delta_scan, ssd_scan.
"""

from __future__ import annotations

from engine.kernels.state.runs import CHECKPOINTS, decay_between, row_at
from engine.kernels.target import tl, triton


@triton.jit
def store_state(
    state, run, states, runs, head, d, runs_stride, state_stride, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FIRST: tl.constexpr, EACH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns d of a head's state into a run; state [columns, BLOCK_K]."""
    c = tl.arange(0, BLOCK_K)
    blocks = runs + run.to(tl.int64) * runs_stride
    at = row_at(blocks, head * KEY_DIM + c, state_stride, c < KEY_DIM, FIRST, EACH, VALUE_DIM)
    whole = (d < VALUE_DIM)[:, None] & (c < KEY_DIM)[None, :]
    tl.store(states + at[None, :] + d[:, None], state.to(states.dtype.element_ty), mask=whole)


@triton.jit
def exact_product(change, keys):
    """change [columns, LANES] float32 times keys [LANES, BLOCK_K] in float32's accuracy: three parts, of bfloat16."""
    if keys.dtype == tl.bfloat16:
        high = change.to(tl.bfloat16)
        rest = change - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, keys) + tl.dot(middle, keys) + tl.dot(high, keys)
    else:
        return tl.dot(change, keys.to(tl.float32), input_precision="ieee")


@triton.jit
def write_states(
    state, keys, change, level, begin, end, row, states, runs, write_run, new_base, checkpoint_run, checkpoint_at,
    head, d, runs_stride, state_stride, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, FIRST: tl.constexpr,
    EACH: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of each run that gets the state behind a position in begin + 1..end: from the state before `begin`.

    keys [LANES, BLOCK_K] and change [columns, LANES] of the positions from `begin` on, level the sums of their gates.
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
    """Behind how many tokens a row's states are written, [2 * CHECKPOINTS], 0 where none is: see `any_between`."""
    lane = tl.arange(0, 2 * CHECKPOINTS)
    checked = lane < tl.where(tl.load(checkpoint_run + row * CHECKPOINTS) > 0, CHECKPOINTS, 0)
    run = tl.load(checkpoint_run + row * CHECKPOINTS + lane, mask=checked, other=0)
    at = tl.load(checkpoint_at + row * CHECKPOINTS + lane, mask=checked & (run > 0), other=0)
    last = tl.where(tl.load(write_run + row) > 0, tl.load(new_base + row), 0)
    return tl.where(lane == CHECKPOINTS, last, at)


@triton.jit
def any_between(ends, begin, end):
    """Whether a run gets the state behind a position in begin + 1..end."""
    return tl.sum(((ends > begin) & (ends <= end)).to(tl.int32), 0) > 0
