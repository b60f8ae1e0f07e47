"""Functions that kernels of state layers share: offsets of rows in runs, short rows, decays, activations."""

from __future__ import annotations

from engine.attention.state_meta import MAX_CHECKPOINTS
from engine.kernels.target import tl, triton

CHECKPOINTS = tl.constexpr(MAX_CHECKPOINTS)


@triton.jit
def run_of(runs, ids, row, runs_stride, mask, EARLY: tl.constexpr = False):
    """Address of the block table of each row's run; `ids` holds the runs of the rows. EARLY: see row_at."""
    run = tl.load(ids + row, mask=mask, other=0, cache_modifier=".cg" if EARLY else "")
    return runs + run.to(tl.int64) * runs_stride


@triton.jit
def plan_of(
    row, runs, base_run, tail_run, base, new_base, start, query_start, checkpoint_run, runs_stride, RING: tl.constexpr
):
    """Loads a row's plan before the wait (kernels/pdl): its first token and their number; the base; positions after the
    base that a fold adds, and positions before the step; block tables of base and tail; whether the row is short.
    """
    first = tl.load(query_start + row, cache_modifier=".cg")
    count = tl.load(query_start + row + 1, cache_modifier=".cg") - first
    behind = tl.load(base + row, cache_modifier=".cg")
    settled = tl.load(new_base + row, cache_modifier=".cg") - behind
    held = tl.load(start + row, cache_modifier=".cg") - behind
    base_blocks = runs + tl.load(base_run + row, cache_modifier=".cg").to(tl.int64) * runs_stride
    tail = runs + tl.load(tail_run + row, cache_modifier=".cg").to(tl.int64) * runs_stride
    checkpoint = tl.load(checkpoint_run + row * CHECKPOINTS, cache_modifier=".cg")
    short = (count > 0) & (held + count <= RING) & (checkpoint == 0)
    return first, count, behind, settled, held, base_blocks, tail, short


@triton.jit
def row_at(
    blocks, line, page_stride, mask, FIRST: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Offsets of rows `line` of a part; a page holds EACH rows of WIDTH numbers, row 0 is in the run's page FIRST.

    EARLY, before grid_wait: loads bypass the unit's cache (kernels/pdl).
    """
    page = tl.load(blocks + FIRST + line // EACH, mask=mask, other=0, cache_modifier=".cg" if EARLY else "").to(
        tl.int64
    )
    return page * page_stride + line % EACH * WIDTH


@triton.jit
def row_of(token, query_start, num_rows, STEPS: tl.constexpr):
    """Finds the last row that begins at or before a token, by bisection; 2 ** STEPS >= num_rows."""
    row = token * 0
    for turn in tl.static_range(STEPS):
        next_row = row + (1 << (STEPS - 1 - turn))
        begin = tl.load(query_start + next_row, mask=next_row < num_rows, other=0x7FFFFFFF)
        row = tl.where(begin <= token, next_row, row)
    return row


@triton.jit
def is_short(row, base, start, query_start, checkpoint_run, mask, RING: tl.constexpr):
    """True if a step kernel computes the row: no checkpoint, and the positions after the base fit in the ring.

    Without a ring (replay) it computes none.
    """
    behind = tl.load(base + row, mask=mask, other=0)
    count = tl.load(query_start + row + 1, mask=mask, other=0) - tl.load(query_start + row, mask=mask, other=0)
    held = tl.load(start + row, mask=mask, other=0) - behind
    return (held + count <= RING) & (tl.load(checkpoint_run + row * CHECKPOINTS, mask=mask, other=0) == 0)


@triton.jit
def decay_between(later, earlier, wanted):
    """exp(later - earlier) where `wanted`, else 0; sums of gates never rise, so no result exceeds 1."""
    return tl.where(wanted, tl.exp(tl.where(wanted, later - earlier, 0.0)), 0.0)


@triton.jit
def running_sum(values, SIZE: tl.constexpr):
    """Prefix sums of values [SIZE]; each is summed separately."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    return tl.sum(tl.where(j <= i, values[None, :], 0.0), 1)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def piece_at(
    blocks, line, page_stride, mask, FIRST: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    PIECE: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """row_at for rows line..line + PIECE - 1 of a head with DIM rows; loads one block number if one page has them."""
    lane = tl.arange(0, PIECE)
    if EACH % PIECE == 0 and DIM % PIECE == 0:
        page = tl.load(blocks + FIRST + line // EACH, cache_modifier=".cg" if EARLY else "").to(tl.int64)
        at = page * page_stride + line % EACH * WIDTH + lane * WIDTH
    else:
        at = row_at(blocks, line + lane, page_stride, mask, FIRST, EACH, WIDTH, EARLY)
    return at


@triton.jit
def input_row(
    position, begin, behind, first, projected, pages, before, tail, projected_stride, page_stride, WIDTH: tl.constexpr,
    RING: tl.constexpr, TAPS: tl.constexpr, BEFORE_FIRST: tl.constexpr, INPUT_FIRST: tl.constexpr,
    INPUT_EACH: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Address of the convolution's input of one position: in the step, in the ring, or before the base.

    `begin`: the position of the row's token `first`; `before`, `tail`: block tables of the base run and the tail's run.
    """
    line, blocks = TAPS - 1 + position - behind, before + BEFORE_FIRST
    if RING > 0:  # otherwise the step has all positions after the base
        held = position >= behind
        line = tl.where(held, position % RING, line)
        blocks = tl.where(held, tail + INPUT_FIRST, blocks)
    inside = (position < begin) & (position >= 0)
    page = tl.load(blocks + line // INPUT_EACH, mask=inside, other=0, cache_modifier=".cg" if EARLY else "").to(
        tl.int64
    )
    stored = pages + page * page_stride + line % INPUT_EACH * WIDTH
    return tl.where(position >= begin, projected + (first + position - begin).to(tl.int64) * projected_stride, stored)
