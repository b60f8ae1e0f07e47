"""Merges the parts of a stripe into the stripe's result, at the end of decode attention's programs.

    m = max_p m_p;   out = sum_p 2^(m_p - m) o_p / sum_p 2^(m_p - m) l_p

A program stores its part's o_p, m_p and l_p and increments a counter; the last program to arrive adds up all parts in
ascending order. Many parts, which stripes over pages of codes have, are merged in two rounds: first runs of GATHER
parts, each by the last of its programs to arrive, then the runs. A single program would take as long to merge 128 parts
as all programs for their keys. A stripe's or run's counter is at the index of its first part, the counter of completed
runs at the index of the stripe's second part; counters are reset for the next launch. User: decode.py in this folder.
"""

from __future__ import annotations

from engine.kernels.target import tl, triton


@triton.jit
def lines_of(line, num_heads, GROUP: tl.constexpr, STRIPE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Offsets of lines from a stripe's first query and a group's first head: the heads of a query, then the next
    query's."""
    at = line * HEAD_DIM
    if STRIPE > 1:
        at = (line // GROUP * num_heads + line % GROUP) * HEAD_DIM
    return at


@triton.jit
def added(
    sums,  # float32 [num_parts, num_lines, HEAD_DIM]
    stats,  # float32 [num_parts, num_lines, 2]: maximum (power of two) and sum
    from_part,
    to_part,
    step,
    first_line,
    num_lines,
    LINES: tl.constexpr,  # of a stripe and KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,  # power of two >= LINES
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,  # parts
):
    """Adds up every step-th part of from_part..to_part-1 -> best, total, result [BLOCK_G, BLOCK_D].

    Other SMs have just written the parts, so the loads bypass this SM's L1 cache.
    """
    line = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_G], -1e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    result = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(from_part, to_part, AT_ONCE * step):
        part = first + tl.arange(0, AT_ONCE) * step
        slot = part[:, None] * num_lines + first_line + line[None, :]
        there = (part < to_part)[:, None] & (line < LINES)[None, :]
        part_best = tl.load(stats + slot * 2, mask=there, other=-1e30, cache_modifier=".cg")
        part_total = tl.load(stats + slot * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        place = slot[:, :, None] * HEAD_DIM + dim[None, None, :]
        inside = there[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        part_sum = tl.load(sums + place, mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(best, tl.max(part_best, 0))
        fade = tl.exp2(best - higher)
        grow = tl.exp2(part_best - higher[None, :])
        total = total * fade + tl.sum(part_total * grow, 0)
        result = result * fade[:, None] + tl.sum(part_sum * grow[:, :, None], 0)
        best = higher
    return best, total, result


@triton.jit
def add_parts(
    out,  # the stripe's first query, and the group's first head
    sums,
    stats,
    from_part,
    to_part,
    step,
    first_line,
    num_lines,
    num_heads,
    queries,
    GROUP: tl.constexpr,
    STRIPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Writes the stripe's result."""
    line, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    _best, total, result = added(
        sums, stats, from_part, to_part, step, first_line, num_lines, GROUP * STRIPE, HEAD_DIM, BLOCK_G, BLOCK_D,
        AT_ONCE,
    )  # fmt: skip
    result = result / tl.where(line < GROUP * queries, total, 1.0)[:, None]
    mask = (line < GROUP * queries)[:, None] & (dim < HEAD_DIM)[None, :]
    at = lines_of(line, num_heads, GROUP, STRIPE, HEAD_DIM)
    tl.store(out + at[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def leave_run(
    sums,
    stats,
    arrived,
    first,
    last,
    from_part,
    to_part,
    kv_head,
    num_kv_heads,
    num_lines,
    LINES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Merges parts first..last-1 into the first part; returns whether all runs of the stripe are merged now.

    Runs are counted at the index of the stripe's second part, where no run begins.
    """
    line, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    best, total, result = added(
        sums, stats, first, last, 1, kv_head * LINES, num_lines, LINES, HEAD_DIM, BLOCK_G, BLOCK_D, AT_ONCE
    )
    tl.debug_barrier()  # every thread has read the first part
    slot = first * num_lines + kv_head * LINES + line
    mask = (line < LINES)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(sums + slot[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
    tl.store(stats + slot * 2, best, mask=line < LINES)
    tl.store(stats + slot * 2 + 1, total, mask=line < LINES)
    tl.debug_barrier()
    counter = arrived + (from_part + 1) * num_kv_heads + kv_head
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    complete = before == (to_part - from_part - 1) // GATHER
    if complete:
        tl.store(counter, 0)
    return complete


@triton.jit
def leave_part(
    out,  # the stripe's first query, and the group's first head
    mine,  # offsets of the lines' elements, [BLOCK_M, BLOCK_D]
    inside,  # mask of these elements
    sums,
    stats,
    arrived,
    result,
    best,
    total,
    part,
    from_part,
    to_part,
    kv_head,
    num_kv_heads,
    num_heads,
    queries,
    GROUP: tl.constexpr,
    STRIPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Writes the result of a stripe of one part. Else stores the part's sums; the last part of a stripe or run to
    arrive merges all of them."""
    if to_part - from_part == 1:
        result = result / total[:, None]
        tl.store(out + mine, result.to(out.dtype.element_ty), mask=inside)
    else:
        LINES: tl.constexpr = GROUP * STRIPE
        line, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        num_lines = num_heads * STRIPE
        slot = part * num_lines + kv_head * LINES  # the list's sums stay below 2^31 numbers
        mask = (line < LINES)[:, None] & (dim < HEAD_DIM)[None, :]
        tl.store(sums + slot * HEAD_DIM + line[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
        tl.store(stats + (slot + line) * 2, best, mask=line < LINES)
        tl.store(stats + (slot + line) * 2 + 1, total, mask=line < LINES)
        # Every thread's stores come before the barrier, and so before the count that publishes them.
        tl.debug_barrier()
        first, last, step = from_part, to_part, 1
        if GATHER > 0 and to_part - from_part > GATHER:
            first += (part - from_part) // GATHER * GATHER
            last, step = tl.minimum(first + GATHER, to_part), GATHER
        counter = arrived + first * num_kv_heads + kv_head
        complete = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last - first - 1
        if complete:
            tl.store(counter, 0)
        if GATHER > 0 and complete & (step > 1):
            complete = leave_run(
                sums, stats, arrived, first, last, from_part, to_part, kv_head, num_kv_heads, num_lines,
                LINES, HEAD_DIM, BLOCK_G, BLOCK_D, AT_ONCE, GATHER,
            )  # fmt: skip
        if complete:
            add_parts(
                out, sums, stats, from_part, to_part, step, kv_head * LINES, num_lines, num_heads, queries,
                GROUP, STRIPE, HEAD_DIM, BLOCK_G, BLOCK_D, AT_ONCE,
            )  # fmt: skip
