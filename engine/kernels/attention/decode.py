"""Attention of rows with few queries over the paged cache; a stripe's context is cut into parts that run in parallel.

    part p:  m_p, l_p, o_p;   m = max_p m_p;   out = sum_p 2^(m_p - m) o_p / sum_p 2^(m_p - m) l_p

A stripe is one query, or with drafts a few queries of one row (work.py). A program computes one part of one stripe and
KV head: a line for each query, and for each query head of the group. If the stripe is a single part, the program writes
the result. Else it stores the part's sums, and the last program to arrive adds up all parts, always in
ascending order, so bits do not depend on timing; it resets the counter for the next launch (merge.py). If kernels
overlap, a program starts to load its first keys before the previous kernel has written the step's queries and keys.
Users: engine/kernels/attention/paged on accelerators.
"""

from __future__ import annotations

import math

from torch import Tensor

from engine.attention.meta import WorkList
from engine.kernels.attention.attend import attend_keys, blocks_of, scaled, score_scales, softmax_init_with_sinks
from engine.kernels.attention.attend_pairs import attend_pairs, split_query
from engine.kernels.attention.merge import leave_part, lines_of
from engine.kernels.attention.tiles import KEYS, KEYS_OF_CODES, WIDE_HEAD
from engine.kernels.float8 import as_pairs, codes_of
from engine.kernels.pages import Scales, is_wide, stride_of
from engine.kernels.pdl import allow_next, fetch_run, launch_options, wait_previous
from engine.kernels.target import Target, target, tl, triton

PREFETCH = 8  # blocks of a program's first part that are prefetched before the previous kernel has ended; at most 32
NARROW = 2048  # query width of a token up to which the layer's matrices count as small: see `blocks_prefetched`
MERGED = 4096  # elements that each warp of a merge holds at once: parts * group * head_dim


@triton.jit
def read_part(parts, part, count, WINDOW: tl.constexpr, STRIPE: tl.constexpr):
    """Token, first key, last key + 1, context, line, first part of the stripe, last part + 1, queries; beyond the list
    one key.

    Loads before the wait bypass this SM's L1 cache, which may hold stale data of earlier steps.
    """
    place = parts + part * 8
    there = part < count
    token = tl.load(place, mask=there, other=0, cache_modifier=".cg").to(tl.int64)
    low = tl.load(place + 1, mask=there, other=0, cache_modifier=".cg")
    high = tl.load(place + 2, mask=there, other=1, cache_modifier=".cg")
    context = tl.load(place + 3, mask=there, other=0, cache_modifier=".cg")
    line = tl.load(place + 4, mask=there, other=0, cache_modifier=".cg").to(tl.int64)
    from_part = tl.load(place + 5, mask=there, other=0, cache_modifier=".cg")
    to_part = tl.load(place + 6, mask=there, other=0, cache_modifier=".cg")
    queries = 1
    if STRIPE > 1:
        queries = tl.load(place + 7, mask=there, other=1, cache_modifier=".cg")
    if WINDOW > 0:
        low = tl.maximum(low, context - (queries - 1) - WINDOW)
    if WINDOW < 0:
        low = tl.maximum(low, (context - queries) // -WINDOW * -WINDOW)
    return token, low, high, context, line, from_part, to_part, queries


@triton.jit
def reaches(line, context, queries, high, GROUP: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr):
    """The last keys of a part's lines, and of their windows; lines behind the stripe's are like its last query's."""
    newest = context - queries + tl.minimum(line // GROUP, queries - 1)
    position = tl.minimum(newest, high - 1)
    if WHOLE:
        position = newest * 0 + high - 1
    if WINDOW < 0:  # a chunk is a window that ends with the chunk
        newest = newest // -WINDOW * -WINDOW - WINDOW - 1
    return position, newest


@triton.jit
def begun(sinks, line, kv_head, queries, part, from_part, GROUP: tl.constexpr):
    """Initial maximum and total of a part's lines; sinks are only in a stripe's first part, so that a sink counts
    once."""
    best = tl.full(line.shape, -1e30, tl.float32)
    total = tl.zeros(line.shape, tl.float32)
    if sinks is not None:
        counts = (line < GROUP * queries) & (line * 0 + part == from_part)
        best, total = softmax_init_with_sinks(sinks, kv_head * GROUP + line % GROUP, counts)
    return best, total


@triton.jit
def fetch_part(
    k_head,
    v_head,
    table,
    low,
    high,
    block_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Prefetches the first blocks of the part's keys and values."""
    number = low // BLOCK_SIZE + tl.arange(0, LANES)
    there = (tl.arange(0, LANES) < PREFETCH) & (number * BLOCK_SIZE < high)
    place = tl.load(table + number, mask=there, other=0, cache_modifier=".cg").to(tl.int64) * block_stride
    size = tl.where(there, BLOCK_SIZE * WIDTH * (k_head.dtype.element_ty.primitive_bitwidth // 8), 0)
    fetch_run(k_head + place, size)
    fetch_run(v_head + place, size)


@triton.jit
def wait_unless_early(part, count, low, high, context, REACH: tl.constexpr, EARLY: tl.constexpr):
    """Waits for the previous kernel, unless the program waits in the first part's first round (EARLY).

    With EARLY the first part's rounds are loaded before the wait, except rounds with the key that the previous kernel
    writes. Every program waits before it ends, even without any round.
    """
    if EARLY:
        own = (high == context) & (high - low <= REACH)
        if (part >= count) | (low >= high) | own:
            wait_previous()
    else:
        wait_previous()


@triton.jit
def decode_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    sums,  # float32 [capacity, num_kv_heads, STRIPE * GROUP, HEAD_DIM]
    stats,  # float32 [capacity, num_kv_heads, STRIPE * GROUP, 2]
    arrived,  # int32 [capacity, num_kv_heads], zero between launches; a stripe's counter is at its first part's index
    q,  # [num_tokens, num_heads, HEAD_DIM]
    k_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]; codes as int16 words of two
    v_cache,
    k_scale,  # scales of codes: float32 [num_blocks, num_kv_heads, BLOCK_SIZE] or [num_kv_heads]; or None
    v_scale,
    block_tables,  # [lines, max_blocks] int32
    sinks,  # [num_heads] float32, or None
    parts,  # [num_parts, 8] int32: see WorkList
    num_parts,  # [1] int32
    max_blocks,
    block_stride,  # stride between blocks of the caches, in elements or words; a block is contiguous
    scale_stride,  # stride between blocks of k_scale and v_scale; 0: one scale per head
    scale,
    bend,
    WINDOW: tl.constexpr,  # 0: none; below 0: chunks
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    STRIPE: tl.constexpr,  # most queries of a part
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # power of two >= STRIPE * GROUP and 16
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GATHER: tl.constexpr,  # parts that are merged before all parts of the stripe have arrived; 0: all at the end
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # blocks that are prefetched before the wait
    LANES: tl.constexpr,  # number of lanes of all warps
    LEAD: tl.constexpr,  # rounds before its end at which a program lets the next kernel start; 0: at its beginning
    CODES: tl.constexpr,  # a constant of float8.py
    MADE: tl.constexpr,  # scales are per token
    WHOLE: tl.constexpr,  # a stripe's queries see all keys of their row
    OVERLAP: tl.constexpr,
):
    kv_head, num_kv_heads = tl.program_id(0), tl.num_programs(0)
    num_heads = num_kv_heads * GROUP
    head, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)  # head: a line
    at = lines_of(head, num_heads, GROUP, STRIPE, HEAD_DIM)
    inside = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    mine = at[:, None] + dim[None, :]
    WIDTH: tl.constexpr = HEAD_DIM // 2 if CODES else HEAD_DIM  # numbers per key in the cache
    k_head = k_cache + kv_head * BLOCK_SIZE * WIDTH
    v_head = v_cache + kv_head * BLOCK_SIZE * WIDTH
    if OVERLAP and not LEAD:
        allow_next()  # the next kernel may start at once
    part, count = tl.program_id(1), tl.load(num_parts, cache_modifier=".cg")
    token, low, high, context, line, from_part, to_part, queries = read_part(parts, part, count, WINDOW, STRIPE)
    if PREFETCH:
        table = block_tables + line * max_blocks
        if part < count:
            fetch_part(k_head, v_head, table, low, high, block_stride, WIDTH, BLOCK_SIZE, PREFETCH, LANES)
    blocks = blocks_of(block_tables + line * max_blocks, low + tl.arange(0, BLOCK_N), high, BLOCK_SIZE, OVERLAP)
    # Scales would be loaded through this SM's L1 cache; of a stripe several keys are new, perhaps in several parts.
    EARLY: tl.constexpr = OVERLAP and CODES == 0 and STRIPE == 1 and not WHOLE
    SPAN: tl.constexpr = 0 if STRIPE == 1 else -WINDOW if WINDOW < 0 else WINDOW  # of windows that differ by line
    if OVERLAP:
        wait_unless_early(part, count, low, high, context, (STAGES + 1) * BLOCK_N, EARLY)
    while part < count:
        where = (token * num_heads + kv_head * GROUP) * HEAD_DIM
        position, newest = head * 0 + high - 1, None
        if STRIPE > 1:
            inside = (head < GROUP * queries)[:, None] & (dim < HEAD_DIM)[None, :]
            position, newest = reaches(head, context, queries, high, GROUP, WINDOW, WHOLE)
        query = tl.zeros([BLOCK_M, BLOCK_D], q.dtype.element_ty)
        late = q + where + mine if EARLY else None
        if not EARLY and CODES == 0:
            query = tl.load(q + where + mine, mask=inside, other=0.0)
        after = part + tl.num_programs(1)
        following = read_part(parts, after, count, WINDOW, STRIPE)
        best, total = begun(sinks, head, kv_head, queries, part, from_part, GROUP)
        table = block_tables + line * max_blocks
        if CODES:
            even, odd, power = split_query(q + where + at, head < GROUP * queries, WIDTH, BLOCK_D // 2)
            factor, curve = scaled(scale, bend, power, SOFTCAP)
            best, total, result = attend_pairs(
                even, odd, position, newest, best, total, k_head, v_head, table, blocks, low, high, k_scale, v_scale,
                scale_stride, kv_head, block_stride, factor, curve, after >= count, SPAN, SOFTCAP, WIDTH,
                BLOCK_SIZE, BLOCK_N, BLOCK_D // 2, WIDE, STAGES, LEAD, CODES, MADE,
            )  # fmt: skip
        else:
            result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            best, total, result = attend_keys(
                query, late, inside, position, newest, best, total, result, k_head, v_head, table, blocks, low,
                low, low, high, None, None, 0, kv_head, block_stride, scale, bend, False, SPAN, SOFTCAP, HEAD_DIM,
                BLOCK_SIZE, BLOCK_N, BLOCK_D, WIDE, STAGES, False, after >= count, LEAD, 0, False, False,
            )  # fmt: skip
        leave_part(
            out + where, mine, inside, sums, stats, arrived, result, best, total, part, from_part, to_part, kv_head,
            num_kv_heads, num_heads, queries, GROUP, STRIPE, HEAD_DIM, BLOCK_M, BLOCK_G, BLOCK_D, AT_ONCE, GATHER,
        )  # fmt: skip
        part = after
        token, low, high, context, line, from_part, to_part, queries = following
        blocks = blocks_of(block_tables + line * max_blocks, low + tl.arange(0, BLOCK_N), high, BLOCK_SIZE, OVERLAP)


def attend_parts(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    work: WorkList,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
    single: bool = False,
    whole: bool = False,
) -> None:
    """Computes the work list's parts into their tokens of out [T, Hq, D]; shapes as `paged_attention`. `single`: every
    row has one query; `whole`: see AttentionMeta."""
    heads, dim = q.shape[1], q.shape[2]
    _, kv_heads, block_size, _ = k_cache.shape
    group = heads // kv_heads
    assert work.sums.shape[1:] == (work.stripe * heads, dim), f"work lists for {work.sums.shape[1:]}, not {q.shape[1:]}"
    stripe = 1 if single else work.stripe
    block_d, block_g = max(16, triton.next_power_of_2(dim)), triton.next_power_of_2(group * stripe)
    block_m, run = max(16, block_g), math.gcd(block_size * dim, k_cache.stride(0))
    pairs = q.shape[0] * kv_heads
    codes = codes_of(k_cache, target())
    if codes:
        block_d = max(32, block_d)  # a product takes 16 words
    share, lead, options = tuned(target(), pairs, heads * dim, block_m, block_d, q.element_size(), codes > 0)
    scale, bend = score_scales(scale, softcap)
    keys, values = as_pairs(k_cache), as_pairs(v_cache)
    programs = max(1, min(share * target().num_units // kv_heads, work.parts.shape[0]))
    at_once = max(1, MERGED * options["num_warps"] // (block_g * block_d))
    decode_kernel[(kv_heads, programs)](
        out, work.sums, work.stats, work.arrived, q, keys, values, *(scales or (None, None)),
        block_tables, sinks, work.parts, work.num_parts, block_tables.shape[1], keys.stride(0), stride_of(scales),
        scale, bend,
        WINDOW=window, SOFTCAP=softcap > 0, GROUP=group, STRIPE=stripe, HEAD_DIM=dim, BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=KEYS_OF_CODES if codes else KEYS, BLOCK_D=block_d, BLOCK_G=block_g,
        AT_ONCE=at_once, GATHER=2 * at_once if codes else 0, WIDE=is_wide(k_cache),
        STAGES=options["num_stages"], LANES=32 * options["num_warps"],
        PREFETCH=blocks_prefetched(target(), pairs, heads * dim, run * k_cache.element_size(), codes > 0), LEAD=lead,
        CODES=codes, MADE=stride_of(scales) > 0, WHOLE=whole, **options, **launch_options(),
    )  # fmt: skip


def tuned(
    device: Target, pairs: int, width: int, block_m: int, block_d: int, element_size: int, codes: bool = False
) -> tuple[int, int, dict[str, int]]:
    """Launch parameters for `pairs` pairs of token and KV head: (programs per unit, rounds, launch options).

    `rounds`: how many rounds before its end a program lets the next kernel start; 0: at its beginning. None of the
    parameters changes the bits of the result.

    A program has only as many warps as its sums need: parts wait for memory, and more parts per unit leave the unit
    less idle. Programs of the next kernel that start early occupy places of this kernel's programs, and the weights
    that they prefetch are evicted before use. So with many rows the next kernel starts only a few rounds before the
    end. Microseconds of steps at 521 keys with Qwen3-0.6B (query width 2,048) and -8B on one H100:

        0.6B, at once    3 stages   16 rows 1,237   24 rows 1,538   32 rows 1,657   48 rows 2,029
        0.6B, 3 rounds   3 stages   16 rows 1,223   24 rows 1,481   32 rows 1,541   48 rows 2,027
        0.6B, 5 rounds   4 stages   16 rows 1,203   24 rows 1,441   32 rows 1,621   48 rows 1,961   64 rows 2,245
        8B, at once      3 stages   16 rows 6,160   24 rows 6,498   32 rows 6,737   64 rows 7,657 (4 stages)
        8B, 5 rounds     4 stages   16 rows 6,108   24 rows 6,414   32 rows 6,648   64 rows 7,659

    With fewer rows `at once` is faster: 0.6B with 8 rows 1,019, with 5 rounds 1,059; 1 row of 1,100 keys 893 and 931.
    """
    warps = min(8, max(1, block_m * block_d // 2048))
    # More programs than fit at once balance the load: a unit with short parts takes more programs.
    share = 8 if codes or pairs >= 2 * device.num_units else 4  # 8 is work.py's number of parts per unit for codes
    stages = 2
    if device.loads_past_registers and block_d <= 128 and element_size <= 2:
        beside_small = width <= NARROW and 1.75 * device.num_units < pairs <= 2 * device.num_units
        stages = 3 if codes or beside_small else 4  # a unit's memory holds three rounds of codes for eight programs
    elif block_d > 128 or element_size > 2:
        warps = max(4, warps)
        stages = (
            1 if block_d > WIDE_HEAD and device.arch != "sm_90" else 2
        )  # two rounds of such keys fit an H100's unit
    few = 2 * pairs <= device.num_units or not device.begins_early
    return share, 0 if few else 3 if stages == 3 else 5, {"num_warps": warps, "num_stages": stages}


def blocks_prefetched(device: Target, pairs: int, width: int, run: int, codes: bool = False) -> int:
    """The number of blocks to prefetch; `width`: query width of a token; `run` bytes divide all lengths and strides.

    A measured rule: in a layer with small matrices the memory is idle while the previous kernel ends. With large
    weights, or with more programs than the cache has space for, prefetched blocks only displace other data.
    Microseconds of steps as in `tuned`, 0.6B, without and with prefetch, next kernel at the end: 48 rows 2,073 and
    2,039, 40 rows 1,867 and 1,861, 64 rows 2,258 and 2,260, 256 rows 6,227 and 6,351. Programs over codes load nothing
    else before the previous kernel has ended, so they always prefetch: attention alone with query width 4,096, without
    and with prefetch, 256 rows of 576 keys 120.6 and 119.0, 32 of 4,096 103.8 and 102.3, one of 32,768 35.9 and 34.0.
    """
    fits = codes or (width <= NARROW and pairs <= 3.4 * device.num_units)
    return PREFETCH if device.begins_early and fits and run % 16 == 0 else 0
