"""Attention of query tiles over the paged cache, for prefill chunks and for decode rows split along their context.

    out[m] = sum_j softmax_j(cap(scale * q[m] . k[j])) v[j],  j <= position(m), j > position(m) - window

A tile holds BLOCK_M query rows: tokens of one row of the batch times the query heads that share one KV head, so a
loaded key serves all of them. Tiles come from a work list on the device (see work.py); the grid depends on shapes only
and programs take items in turn, so a launch depends on no length and can be captured in a graph. With SPLIT an item is
one token and some of its keys, and leaves a partial result that `merge` adds up. Users:
engine/kernels/attention/paged on accelerators.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import AttentionMeta
from engine.kernels.target import target, tl, triton


@triton.jit
def attend_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]; with SPLIT float32 [num_items, num_heads, HEAD_DIM]
    stats,  # with SPLIT: float32 [num_items, num_heads, 2], maximum (base 2) and sum
    q,  # [num_tokens, num_heads, HEAD_DIM]
    k_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    v_cache,
    query_start,  # [num_rows + 1] int32
    context_len,  # [num_rows] int32
    block_tables,  # [lines, max_blocks] int32
    items,  # [num_items, 4] int32: row, first token of the tile or first key of the part, its last key + 1, table line
    num_items,  # [1] int32, on the device
    max_blocks,
    scale,
    softcap,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,  # items are parts; else whole contexts with their final result
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
):
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    num_heads = num_kv_heads * GROUP
    line = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_dim = dim < HEAD_DIM
    count = tl.load(num_items)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(items + item * 4)
        first = tl.load(items + item * 4 + 1)
        table = block_tables + tl.load(items + item * 4 + 3).to(tl.int64) * max_blocks
        begin = tl.load(query_start + row).to(tl.int64)
        length = tl.load(query_start + row + 1).to(tl.int64) - begin
        context = tl.load(context_len + row)
        low = first * 0
        if SPLIT:
            low, first = first, low
        token = first + line // GROUP  # inside the row
        head = kv_head * GROUP + line % GROUP
        valid = (token < length) & (line < BLOCK_M // GROUP * GROUP)
        position = context - length + token
        where = ((begin + token) * num_heads + head) * HEAD_DIM
        query = tl.load(q + where[:, None] + dim[None, :], mask=valid[:, None] & in_dim[None, :], other=0.0)
        last = tl.minimum(context, context - length + first + BLOCK_M // GROUP)  # one past the tile's last position
        high = last
        if SPLIT:
            high = tl.minimum(last, tl.load(items + item * 4 + 2))
        if WINDOW > 0:
            low = tl.maximum(low, (context - length + first - WINDOW + 1) // BLOCK_N * BLOCK_N)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(low.to(tl.int32), high.to(tl.int32), BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            in_key = key < high
            block = tl.load(table + key // BLOCK_SIZE, mask=in_key, other=0).to(tl.int64)
            place = ((block * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
            keys = tl.load(k_cache + place[None, :] + dim[:, None], mask=in_key[None, :] & in_dim[:, None], other=0.0)
            score = tl.dot(query, keys.to(query.dtype), input_precision="ieee") * scale
            if SOFTCAP:
                score = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score / softcap)))  # softcap * tanh(score / softcap)
            seen = (key[None, :] <= position[:, None]) & in_key[None, :] & valid[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
            higher = tl.maximum(best, tl.max(score, 1))
            # A line that has seen nothing yet keeps -inf; 0 stands in for it so that no difference is NaN.
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(score - anchor[:, None])
            fade = tl.exp2(best - anchor)
            values = tl.load(v_cache + place[:, None] + dim[None, :], mask=in_key[:, None] & in_dim[None, :], other=0.0)
            total = total * fade + tl.sum(weight, 1)
            result = result * fade[:, None]
            result = tl.dot(weight.to(query.dtype), values.to(query.dtype), result, input_precision="ieee")
            best = higher
        if SPLIT:
            # One token per item: line is the head inside the group.
            slot = (item * num_kv_heads + kv_head).to(tl.int64) * GROUP + line
            tl.store(out + slot[:, None] * HEAD_DIM + dim[None, :], result, mask=valid[:, None] & in_dim[None, :])
            tl.store(stats + slot * 2, best, mask=valid)
            tl.store(stats + slot * 2 + 1, total, mask=valid)
        else:
            result = result / tl.where(total > 0, total, 1.0)[:, None]
            mask = valid[:, None] & in_dim[None, :]
            tl.store(out + where[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


def attend_parts(
    sums: Tensor,
    stats: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    items: Tensor,
    num_items: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Decode items -> sums float32 [capacity, Hq, D], stats float32 [capacity, Hq, 2], for `merge`.

    items int32 [capacity, 4] and num_items int32 [1] lie on the device; entries beyond num_items are not touched.
    Shapes otherwise as `paged_attention`.
    """
    block_m = max(16, triton.next_power_of_2(q.shape[1] // k_cache.shape[1]))
    assert sums.shape[1:] == q.shape[1:] and sums.dtype == stats.dtype == torch.float32, "lists of another model"
    # A tile of one token: the lines beyond the group are masked because their token is beyond the row.
    _launch(sums, stats, q, k_cache, v_cache, meta, items, num_items, scale, window, softcap, True, block_m)


def attend_whole(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    items: Tensor,
    num_items: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Prefill items -> their tokens' rows of out [T, Hq, D]; tiles are `tile_tokens` long."""
    block_m = prefill_tile(q.shape[1] // k_cache.shape[1])
    _launch(out, out, q, k_cache, v_cache, meta, items, num_items, scale, window, softcap, False, block_m)


def prefill_tile(group: int) -> int:
    """Query rows of a prefill tile: 128, or more when a group alone is larger."""
    return max(128, triton.next_power_of_2(group))


def _launch(
    out: Tensor, stats: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, items: Tensor,
    num_items: Tensor, scale: float, window: int, softcap: float, split: bool, block_m: int,
) -> None:  # fmt: skip
    heads, dim = q.shape[1], q.shape[2]
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
    assert heads % kv_heads == 0 and k_cache.shape[3] == dim and items.dtype == num_items.dtype == torch.int32
    block_d = max(16, triton.next_power_of_2(dim))
    block_n = 64 if block_d <= 128 and q.element_size() == 2 else 32
    group, rows = heads // kv_heads, meta.context_len.shape[0]
    # No step of these shapes has more items than this.
    most = items.shape[0] if split else min(q.shape[0], q.shape[0] // (block_m // group) + rows)
    programs = max(1, 4 * target().num_units // kv_heads)
    attend_kernel[(min(programs, most), kv_heads)](
        out, stats, q, k_cache, v_cache, meta.query_start, meta.context_len, meta.block_tables, items, num_items,
        meta.block_tables.shape[1], scale, softcap,
        GROUP=group, HEAD_DIM=dim, BLOCK_SIZE=block_size, WINDOW=window, SOFTCAP=softcap > 0, SPLIT=split,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=8 if block_m >= 128 else 4, num_stages=2,
    )  # fmt: skip
