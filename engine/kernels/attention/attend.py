"""The inner loop of paged attention: blocks of keys into a running softmax, for the prefill and the decode kernel.

    out[m] = sum_j softmax_j(cap(scale * q[m] . k[j])) v[j],  j <= position(m), j > newest(m) - window
    with a sink: its logit joins the softmax's sum, and has no value

Exponentials use base 2: exp2(score * scale - best), with log2(e) inside `scale`. `best` starts at -1e30 instead of
-inf, so that a line without any visible key yet makes no NaN. A block whose keys are all hidden from a line does not
change that line's bits, and a block without hidden keys gives the same bits with and without a mask. Users:
prefill.py, decode.py and attend_pairs.py in this folder.

8-bit codes are multiplied as float16, which represents every code exactly, unless queries are float32. A line of
queries is scaled by a power of two to at most 2, and its scores are scaled back. Weights are up to 2^15, so that
weights far below the largest do not underflow. A key's scale multiplies its scores; a value's scale, divided by the
largest scale so far, multiplies its weights. In a prompt's tile each thread would need the scales of all keys, so the
scales multiply the keys and values instead (FOLD). A token's scales are powers of two, so the bits are equal as long as
the numbers stay below 65,504; on an H200 prompts took 0.43 to 0.63 of the time.
"""

from __future__ import annotations

import math

from engine.kernels.float8 import widen8
from engine.kernels.pdl import allow_next, wait_in_loop
from engine.kernels.target import tl, triton

LOG2E = math.log2(math.e)


@triton.jit
def attend_keys(
    query,  # [BLOCK_M, BLOCK_D]; unused with `late`
    late,  # pointers to the query, which is loaded after the wait in the first round; None: `query` is loaded
    inside,  # mask of the pointers
    position,  # [BLOCK_M] int32: the last key that a line sees
    newest,  # [BLOCK_M] int32, with WINDOW: the last key of a line's window
    best,  # [BLOCK_M] float32
    total,  # [BLOCK_M] float32
    result,  # [BLOCK_M, BLOCK_D] float32
    k_head,  # this KV head of the first block; a block's keys follow each other, HEAD_DIM apart
    v_head,
    table,  # int32: the row's blocks
    blocks,  # block numbers of the first round's keys, or None
    low,
    seen,  # with EDGES: before this key, a multiple of blocks, only the window may hide keys
    floor,  # with WINDOW: earlier keys may have left the cache; key `floor` is loaded instead
    end,  # keys from here on are not in the cache; the last key before is loaded instead
    k_scale,  # float32 scales of codes; None: no scales
    v_scale,
    scale_stride,  # with MADE: from a block's scales to the next's
    kv_head,
    block_stride,
    scale,  # one for all lines, or [BLOCK_M]
    bend,
    EDGES: tl.constexpr,  # blocks that all lines see completely need no mask
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,  # offsets into the caches pass 2^31
    STAGES: tl.constexpr,
    MATERIALISE: tl.constexpr,  # see `materialised`; CUDA only
    last,  # whether these keys are the program's last work; only then may the next kernel start early
    LEAD: tl.constexpr,  # rounds before the end from which the next kernel may start; 0: the caller decides
    CODES: tl.constexpr,  # a constant of float8.py
    MADE: tl.constexpr,  # scales are per token, powers of two; else per head
    FOLD: tl.constexpr,  # with MADE: scales multiply keys and values when they are widened
):
    """Attends to keys low..end-1, in whole blocks whose remaining keys `position` hides -> best, total, result."""
    dim, lane = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    if blocks is None:
        first = low + lane
        if WINDOW > 0:
            first = tl.maximum(first, floor)
        blocks = blocks_of(table, first, end, BLOCK_SIZE, False)
    largest = low * 0.0  # largest scale of values so far
    if k_scale is not None and not MADE:
        scale, bend = scaled(scale, bend, tl.load(k_scale + kv_head), SOFTCAP)
    for start in tl.range(low, end, BLOCK_N, num_stages=STAGES):
        key = tl.minimum(start + lane, end - 1)
        if WINDOW > 0:
            key = tl.maximum(key, floor)
        if WIDE:
            blocks = blocks.to(tl.int64)
        place = blocks * block_stride + (key.to(tl.uint32) % BLOCK_SIZE).to(tl.int32) * HEAD_DIM
        if MADE:
            factor = blocks * scale_stride + kv_head * BLOCK_SIZE + (key.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
            key_scale, value_scale = scales_at(k_scale, factor, FOLD), scales_at(v_scale, factor, FOLD)
        # The next round's block numbers are loaded now, so that its keys wait for one load instead of two.
        blocks = blocks_of(table, start + BLOCK_N + lane, end, BLOCK_SIZE, late is not None)
        where = place[:, None] + dim[None, :]
        keys = numbers_at(k_head + where, dim, query.dtype, HEAD_DIM, BLOCK_D, CODES)
        values = numbers_at(v_head + where, dim, query.dtype, HEAD_DIM, BLOCK_D, CODES)
        if FOLD:
            keys, values = keys * key_scale.to(query.dtype), values * value_scale.to(query.dtype)
        if late is not None:
            is_first = start == low
            if is_first:
                wait_in_loop()
                query = tl.load(late, mask=inside, other=0.0)
        if LEAD:
            is_near = last & (start + LEAD * BLOCK_N >= end)
            if is_near:
                allow_next()
        if MATERIALISE:
            result = materialised(result)
        score = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
        if MADE and not FOLD:
            score = score * key_scale
        if SOFTCAP:
            score = capped(score, bend, CODES)
        if EDGES:
            edge = (start >= seen) | (start + WINDOW < end) if WINDOW > 0 else start >= seen
            if edge:
                score = hide(score, start + lane, position, newest, WINDOW)
        else:
            score = hide(score, start + lane, position, newest, WINDOW)
        weight, fade, best, total = weighed(score, scale, best, total, CODES, SOFTCAP)
        if MADE and not FOLD:
            weight, fade, largest = with_scales(weight, fade, value_scale, largest)
        result, weight = result * fade[:, None], weight.to(query.dtype)
        result = tl.dot(weight, values.to(query.dtype), result, input_precision="ieee")
    if MADE and not FOLD:
        result = result * largest
    elif k_scale is not None and not MADE:
        result = result * tl.load(v_scale + kv_head)
    return best, total, result


@triton.jit
def scaled(scale, bend, factor, SOFTCAP: tl.constexpr):
    """scale and bend for scores that must be multiplied by `factor`."""
    if SOFTCAP:
        bend = bend * factor
    else:
        scale = scale * factor
    return scale, bend


@triton.jit
def capped(score, bend, CODES: tl.constexpr):
    """tanh(score * bend); the cap itself is part of the scale."""
    if CODES:
        bend = bend[:, None]
    return 1.0 - 2.0 / (1.0 + tl.exp2(score * bend))


@triton.jit
def weighed(score, scale, best, total, CODES: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores of a round -> weights, the factor for the sums so far, and the updated best and total."""
    LIFT: tl.constexpr = 15 if CODES else 0  # float16 ranges from 2^-24 to 2^16
    higher = tl.maximum(best, tl.max(score, 1) * scale - LIFT)
    if CODES and not SOFTCAP:
        scale = scale[:, None]
    weight = tl.exp2(score * scale - higher[:, None])
    fade = tl.exp2(best - higher)
    return weight, fade, higher, total * fade + tl.sum(weight, 1)


@triton.jit
def with_scales(weight, fade, scale, largest):
    """Weights times values' scales / the largest scale so far; `fade` is corrected if the largest scale changed."""
    larger = tl.maximum(largest, tl.max(scale))
    return weight * (scale / larger), fade * (largest / larger), larger


@triton.jit
def powers(most):
    """float32 -> the largest power of two not above each (2^-60 for zeros, since it multiplies -inf), and its
    inverse."""
    bits = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) & 0x7F800000, 0x21800000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def blocks_of(table, key, end, BLOCK_SIZE: tl.constexpr, EARLY: tl.constexpr):
    """The keys' block numbers; keys from `end` on get the last key's block. EARLY: bypasses this SM's L1 cache."""
    place = table + tl.minimum(key, end - 1).to(tl.uint32) // BLOCK_SIZE  # unsigned: a shift, no fixing up
    return tl.load(place, cache_modifier=".cg" if EARLY else "")


@triton.jit
def numbers_at(place, dim, dtype, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CODES: tl.constexpr):
    """[keys, BLOCK_D] of a cache, zero beyond HEAD_DIM; codes are widened to dtype."""
    if HEAD_DIM == BLOCK_D:
        numbers = tl.load(place)
    else:
        numbers = tl.load(place, mask=dim[None, :] < HEAD_DIM, other=0.0)
    if CODES:
        numbers = widen8(numbers, dtype, CODES)
    return numbers


@triton.jit
def scales_at(place, factor, FOLD: tl.constexpr):
    """float32 scales of tokens: [keys, 1] with FOLD, for numbers [keys, dim]; else [1, keys], for scores."""
    scale = tl.load(place + factor)
    if FOLD:
        scale = scale[:, None]
    else:
        scale = scale[None, :]
    return scale


@triton.jit
def hide(score, key, position, newest, WINDOW: tl.constexpr):
    """score, with -inf where a line does not see the key."""
    seen = key[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > newest[:, None] - WINDOW)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def materialised(value):
    """value unchanged, but opaque to the compiler on CUDA, which so finishes the matrix product summed into it here.

    A product that stays in flight during the next block's scores costs more in registers and copies than it saves.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, True, 1)


@triton.jit
def softmax_init_with_sinks(sinks, head, mask):
    """Initial best and total of lines with their heads' sinks; a sink of -inf means no sink."""
    sink = tl.load(sinks + head, mask=mask, other=float("-inf")) * 1.4426950408889634  # log2(e)
    best = tl.maximum(sink, -1e30)
    return best, tl.exp2(sink - best)


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """scale and bend of `attend_keys`: the factor to base-2 exponents, and the factor inside the cap's tanh."""
    if softcap > 0:
        return softcap * LOG2E, 2 * LOG2E * scale / softcap
    return scale * LOG2E, 0.0
