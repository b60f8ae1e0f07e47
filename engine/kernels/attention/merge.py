"""Merges the parts of a row into the row's result, at the end of decode attention's programs.

    m = max_p m_p;   out = sum_p 2^(m_p - m) o_p / sum_p 2^(m_p - m) l_p

A program stores its part's o_p, m_p and l_p and increments a counter; the last program to arrive adds up all parts in
ascending order. Many parts, which rows over pages of codes have, are merged in two rounds: first runs of GATHER parts,
each by the last of its programs to arrive, then the runs. A single program would take as long to merge 128 parts as
all programs for their keys. A row's or run's counter is at the index of its first part, the counter of completed runs
at the index of the row's second part; counters are reset for the next launch. User: decode.py in this folder.
"""

from __future__ import annotations

from engine.kernels.target import tl, triton


@triton.jit
def added(
    sums,  # float32 [num_parts, num_heads, HEAD_DIM]
    stats,  # float32 [num_parts, num_heads, 2]: maximum (power of two) and sum
    from_part,
    to_part,
    step,
    first_head,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,  # power of two >= GROUP
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,  # parts
):
    """Adds up every step-th part of from_part..to_part-1 -> best, total, result [BLOCK_G, BLOCK_D].

    Other SMs have just written the parts, so the loads bypass this SM's L1 cache.
    """
    head = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_G], -1e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    result = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(from_part, to_part, AT_ONCE * step):
        part = first + tl.arange(0, AT_ONCE) * step
        slot = part[:, None] * num_heads + first_head + head[None, :]
        there = (part < to_part)[:, None] & (head < GROUP)[None, :]
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
    out,  # the row's token and KV head: [GROUP, HEAD_DIM]
    sums,
    stats,
    from_part,
    to_part,
    step,
    first_head,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Writes the row's result."""
    head, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    _best, total, result = added(
        sums, stats, from_part, to_part, step, first_head, num_heads, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, AT_ONCE
    )
    result = result / tl.where(head < GROUP, total, 1.0)[:, None]
    mask = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + head[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


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
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Merges parts first..last-1 into the first part; returns whether all runs of the row are merged now.

    Runs are counted at the index of the row's second part, where no run begins.
    """
    head, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    best, total, result = added(
        sums, stats, first, last, 1, kv_head * GROUP, num_heads, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, AT_ONCE
    )
    tl.debug_barrier()  # every thread has read the first part
    slot = first * num_heads + kv_head * GROUP + head
    mask = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(sums + slot[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
    tl.store(stats + slot * 2, best, mask=head < GROUP)
    tl.store(stats + slot * 2 + 1, total, mask=head < GROUP)
    tl.debug_barrier()
    counter = arrived + (from_part + 1) * num_kv_heads + kv_head
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    complete = before == (to_part - from_part - 1) // GATHER
    if complete:
        tl.store(counter, 0)
    return complete


@triton.jit
def leave_part(
    out,  # the row's token and KV head: [GROUP, HEAD_DIM]
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
    mine,  # offsets of the group's elements, contiguous, [BLOCK_M, BLOCK_D]
    inside,  # mask of these elements
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Stores a part's sums; the last part of a row or run to arrive merges all of them."""
    head = tl.arange(0, BLOCK_M)
    slot = part * num_heads + kv_head * GROUP  # the list's sums stay below 2^31 numbers
    tl.store(sums + slot * HEAD_DIM + mine, result, mask=inside)
    tl.store(stats + (slot + head) * 2, best, mask=head < GROUP)
    tl.store(stats + (slot + head) * 2 + 1, total, mask=head < GROUP)
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
            sums, stats, arrived, first, last, from_part, to_part, kv_head, num_kv_heads, num_heads,
            GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, AT_ONCE, GATHER,
        )  # fmt: skip
    if complete:
        add_parts(
            out, sums, stats, from_part, to_part, step, kv_head * GROUP, num_heads,
            GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, AT_ONCE,
        )  # fmt: skip
