"""The inner loop of paged attention: blocks of keys into a running softmax, for the prefill and the decode kernel.

    out[m] = sum_j softmax_j(cap(scale * q[m] . k[j])) v[j],  j <= position(m), j > newest(m) - window
    with a sink: its logit joins the softmax's sum, and has no value

Everything runs in powers of two: exp2(score * scale - best), with log2(e) inside `scale`. `best` starts at -1e30, not
at -inf, so that a line which has seen no key yet makes no NaN. A block that hides all its keys from a line leaves that
line's bits as they were, and a block that hides none gives the same bits with a mask and without. Users: prefill.py,
decode.py and attend_pairs.py in this folder.

Codes of 8 bits are multiplied as float16, which holds each of them, unless queries are float32. A line of queries is
brought to at most 2 by a power of two, which its scores get back; weights are up to 2^15, so that weights far below
the largest are not lost. A key's scale multiplies its scores; a value's scale, divided by the largest so far, its
weights. A prompt's tile, whose threads each have scores of all keys and would load all scales, multiplies the numbers
instead (FOLD): a token's scales are powers of two, so where its numbers are below 65,504 the bits are the same, and on
an H200 prompts took 0.43 to 0.63 of the time.
"""

from __future__ import annotations

import math

from engine.kernels.float8 import widen8
from engine.kernels.pdl import allow_next, wait_in_loop
from engine.kernels.target import tl, triton

LOG2E = math.log2(math.e)


@triton.jit
def attend_keys(
    query,  # [BLOCK_M, BLOCK_D]; with `late` nothing yet
    late,  # pointers of the query, which is read after the wait that comes in the first round; None: there it is
    inside,  # which of them there are
    position,  # [BLOCK_M] int32: the last key that a line sees
    newest,  # [BLOCK_M] int32, with WINDOW: the last key of a line's window
    best,  # [BLOCK_M] float32
    total,  # [BLOCK_M] float32
    result,  # [BLOCK_M, BLOCK_D] float32
    k_head,  # this KV head of the first block; a block's keys follow each other, HEAD_DIM apart
    v_head,
    table,  # int32: the row's blocks
    blocks,  # those of the first round's keys, or None
    low,
    seen,  # with EDGES: up to here, in whole blocks, nothing but the window hides a key
    floor,  # with WINDOW: keys before it may have left the cache, and it is read in their place
    end,  # keys from here on are not in the cache: the last one before is read in their place
    k_scale,  # float32, of keys that are codes; None: they have none
    v_scale,
    scale_stride,  # with MADE: from a block's scales to the next's
    kv_head,
    block_stride,
    scale,  # of all lines, or [BLOCK_M]
    bend,
    EDGES: tl.constexpr,  # a block that all lines see goes without a mask
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,  # offsets into the caches pass 2^31
    STAGES: tl.constexpr,
    MATERIALISE: tl.constexpr,  # see `materialised`; CUDA only
    last,  # whether these keys are the program's last work: only then may the next kernel start early
    LEAD: tl.constexpr,  # rounds before the end from which the next kernel may start; 0: the caller decides
    CODES: tl.constexpr,  # of float8.py
    MADE: tl.constexpr,  # each token has scales of its own, powers of two; else there is one for each head
    FOLD: tl.constexpr,  # with MADE: scales multiply the numbers as they are widened
):
    """Keys low..end-1 (or the rest of the last block, which position hides) -> best, total, result."""
    dim, lane = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    if blocks is None:
        first = low + lane
        if WINDOW > 0:
            first = tl.maximum(first, floor)
        blocks = blocks_of(table, first, end, BLOCK_SIZE, False)
    largest = low * 0.0  # of values' scales
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
        # The next round's block numbers are read now, so that its keys wait for one load instead of two.
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
    """scale and bend of scores that a factor brings to what they are."""
    if SOFTCAP:
        bend = bend * factor
    else:
        scale = scale * factor
    return scale, bend


@triton.jit
def capped(score, bend, CODES: tl.constexpr):
    """tanh of scores times bend; the cap itself is in the scale."""
    if CODES:
        bend = bend[:, None]
    return 1.0 - 2.0 / (1.0 + tl.exp2(score * bend))


@triton.jit
def weighed(score, scale, best, total, CODES: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores of a round -> their weights, the factor of sums so far, and best and total with the round's."""
    LIFT: tl.constexpr = 15 if CODES else 0  # float16 ends at 2^16 and at 2^-24
    higher = tl.maximum(best, tl.max(score, 1) * scale - LIFT)
    if CODES and not SOFTCAP:
        scale = scale[:, None]
    weight = tl.exp2(score * scale - higher[:, None])
    fade = tl.exp2(best - higher)
    return weight, fade, higher, total * fade + tl.sum(weight, 1)


@triton.jit
def with_scales(weight, fade, scale, largest):
    """Weights times their values' scales, over the largest scale so far, for which the sums so far change theirs."""
    larger = tl.maximum(largest, tl.max(scale))
    return weight * (scale / larger), fade * (largest / larger), larger


@triton.jit
def powers(most):
    """float32 -> the power of two below each, of zeros 2^-60 (it is a factor of -inf), and one over it."""
    bits = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) & 0x7F800000, 0x21800000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def blocks_of(table, key, end, BLOCK_SIZE: tl.constexpr, EARLY: tl.constexpr):
    """The keys' blocks, of those from `end` on that of the last one before. EARLY: read past this unit's cache."""
    place = table + tl.minimum(key, end - 1).to(tl.uint32) // BLOCK_SIZE  # unsigned: a shift, no fixing up
    return tl.load(place, cache_modifier=".cg" if EARLY else "")


@triton.jit
def numbers_at(place, dim, dtype, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CODES: tl.constexpr):
    """[keys, BLOCK_D] numbers of a cache, zero behind HEAD_DIM; codes are widened to dtype."""
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
    """score, -inf where a line does not see the key."""
    seen = key[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > newest[:, None] - WINDOW)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def materialised(value):
    """value unchanged, but opaque to the compiler on CUDA: a product summed into it ends here.

    A product left in flight behind the next block's scores costs more registers and copies than it hides time.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, True, 1)


@triton.jit
def softmax_init_with_sinks(sinks, head, mask):
    """best and total of lines that begin with their heads' sinks; a sink of -inf is none."""
    sink = tl.load(sinks + head, mask=mask, other=float("-inf")) * 1.4426950408889634  # log2(e)
    best = tl.maximum(sink, -1e30)
    return best, tl.exp2(sink - best)


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """scale and bend of `attend_keys`: of scores to powers of two, and of scores inside the cap's tanh."""
    if softcap > 0:
        return softcap * LOG2E, 2 * LOG2E * scale / softcap
    return scale * LOG2E, 0.0
