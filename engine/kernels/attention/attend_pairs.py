"""The inner loop of decode attention over 8-bit codes: as `attend_keys`, with two codes in a word.

    word j of a key holds the numbers 2j and 2j + 1:  score = even . low(words) + odd . high(words)
    word j of a value makes the sums 2j and 2j + 1:   evens += weight low(words), odds += weight high(words)

A 16-bit word is loaded like a bfloat16, with wide copies and transposing loads, and is split into two numbers only in
the registers of the matrix product, so no single bytes are moved. Queries are split once and sums are joined once per
part. User: decode.py in this folder.
"""

from __future__ import annotations

from engine.kernels.attention.attend import blocks_of, capped, hide, powers, scaled, weighed, with_scales
from engine.kernels.float8 import widen_pairs
from engine.kernels.pdl import allow_next
from engine.kernels.target import tl, triton


@triton.jit
def attend_pairs(
    even,  # [BLOCK_M, BLOCK_W]: the queries' elements 2j, scaled to below 2; see `split_query`
    odd,  # [BLOCK_M, BLOCK_W]: elements 2j + 1
    position,  # [BLOCK_M] int32: the last key that a line sees
    newest,  # [BLOCK_M] int32, with WINDOW: the last key of a line's window
    best,  # [BLOCK_M] float32
    total,  # [BLOCK_M] float32
    k_head,  # int16 words: this KV head of the first block; a block's keys follow each other, WORDS apart
    v_head,
    table,  # int32: the row's blocks
    blocks,  # block numbers of the first round's keys
    low,
    end,  # keys from here on are not in the cache; the last key before is loaded instead
    k_scale,  # float32 scales, or None
    v_scale,
    scale_stride,  # with MADE: from a block's scales to the next's
    kv_head,
    block_stride,  # words
    scale,  # one for all lines, or [BLOCK_M]
    bend,
    last,  # whether these keys are the program's last work; only then may the next kernel start early
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    WORDS: tl.constexpr,  # words per key
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,  # power of two >= WORDS
    WIDE: tl.constexpr,  # offsets into the caches pass 2^31
    STAGES: tl.constexpr,
    LEAD: tl.constexpr,  # rounds before the end from which the next kernel may start; 0: the caller decides
    CODES: tl.constexpr,  # a constant of float8.py
    MADE: tl.constexpr,  # scales are per token, powers of two; else per head
):
    """Attends to keys low..end-1 -> best, total, result [BLOCK_M, 2 * BLOCK_W]."""
    word, lane = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_N)
    evens, odds = tl.zeros(even.shape, tl.float32), tl.zeros(odd.shape, tl.float32)
    largest = low * 0.0  # largest scale of values
    if k_scale is not None and not MADE:
        scale, bend = scaled(scale, bend, tl.load(k_scale + kv_head), SOFTCAP)
    for start in tl.range(low, end, BLOCK_N, num_stages=STAGES):
        key = tl.minimum(start + lane, end - 1)
        if WIDE:
            blocks = blocks.to(tl.int64)
        offset = (key.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        where = (blocks * block_stride + offset * WORDS)[:, None] + word[None, :]
        if MADE:
            factor = blocks * scale_stride + kv_head * BLOCK_SIZE + offset
            key_scale, value_scale = tl.load(k_scale + factor), tl.load(v_scale + factor)
        # The next round's block numbers are read now, so that its keys wait for one load instead of two.
        blocks = blocks_of(table, start + BLOCK_N + lane, end, BLOCK_SIZE, False)
        keys = words_at(k_head + where, word, WORDS, BLOCK_W)
        values = words_at(v_head + where, word, WORDS, BLOCK_W)
        if LEAD:
            is_near = last & (start + LEAD * BLOCK_N >= end)
            if is_near:
                allow_next()
        lower, upper = widen_pairs(tl.trans(keys), even.dtype, CODES)
        score = tl.dot(even, lower, input_precision="ieee")
        score = tl.dot(odd, upper, score, input_precision="ieee")
        if MADE:
            score = score * key_scale[None, :]
        if SOFTCAP:
            score = capped(score, bend, CODES)
        score = hide(score, start + lane, position, newest, WINDOW)
        weight, fade, best, total = weighed(score, scale, best, total, CODES, SOFTCAP)
        if MADE:
            weight, fade, largest = with_scales(weight, fade, value_scale[None, :], largest)
        weight = weight.to(even.dtype)
        lower, upper = widen_pairs(values, even.dtype, CODES)
        evens = tl.dot(weight, lower, evens * fade[:, None], input_precision="ieee")
        odds = tl.dot(weight, upper, odds * fade[:, None], input_precision="ieee")
    result = tl.interleave(evens, odds)
    if MADE:
        result = result * largest
    elif k_scale is not None:
        result = result * tl.load(v_scale + kv_head)
    return best, total, result


@triton.jit
def words_at(place, word, WORDS: tl.constexpr, BLOCK_W: tl.constexpr):
    """[keys, BLOCK_W] words of a cache, zero beyond WORDS."""
    if WORDS == BLOCK_W:
        words = tl.load(place)
    else:
        words = tl.load(place, mask=word[None, :] < WORDS, other=0)
    return words


@triton.jit
def split_query(lines, there, WORDS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Lines of queries, pointers [BLOCK_M], zero if not `there` -> even and odd elements divided by a power of two, and
    that power [BLOCK_M]."""
    word = tl.arange(0, BLOCK_W)
    place = lines[:, None] + 2 * word[None, :]
    inside = there[:, None] & (word < WORDS)[None, :]
    even = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(place + 1, mask=inside, other=0.0).to(tl.float32)
    power, over = powers(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1))
    even, odd = even * over[:, None], odd * over[:, None]
    if lines.dtype.element_ty != tl.float32:
        even, odd = even.to(tl.float16), odd.to(tl.float16)
    return even, odd, power
