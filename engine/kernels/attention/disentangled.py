"""Disentangled attention inside segments (DeBERTa): each score has two further terms, of a token and a distance.

out[i] = sum_j softmax_j(scale * (q[i] . k[j] + q[i] . pk[b] + k[j] . pq[b])) v[j],  b = bucket(i - j), over the rows j
of i's segment: https://arxiv.org/abs/2006.03654, equation 4. pk and pq have a row per bucket of distances. A tile of
queries and a block of keys have BLOCK_M + BLOCK_N - 1 distances. The kernel gathers the rows of these distances,
multiplies them with the tile's queries and the block's keys, and each score picks its two products. User:
`engine/models/pooling/deberta_v2`.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from engine.kernels.attention.attend import materialised
from engine.kernels.attention.dense import load_rows, segments_of
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton


@triton.jit(do_not_specialize=["num_rows", "num_segments", "halvings", "reach"])
def disentangled_kernel(
    out,  # [num_rows, num_heads, HEAD_DIM], contiguous
    q,  # [num_rows, num_heads, HEAD_DIM], strided; k and v too
    k,
    v,
    pos_k,  # [num_buckets, num_heads, HEAD_DIM], contiguous; pos_q too
    pos_q,
    buckets,  # [2 reach + 1] int32: the buckets of the distances -reach to reach
    bounds,  # [num_segments + 1] int32
    num_rows,
    num_segments,
    halvings,  # steps of the bisection over num_segments
    reach,
    scale,  # factor of scores to base-2 exponents
    out_stride,  # row stride of out, pos_k and pos_q
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # BLOCK_M + BLOCK_N is a power of two
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,  # offsets into q, k or v pass 2^31
    MATERIALISE: tl.constexpr,  # see `materialised`; CUDA only
    OVERLAP: tl.constexpr,
):
    grid_wait(OVERLAP)
    head = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_M
    dim = tl.arange(0, BLOCK_D)
    q += head * q_head
    k += head * k_head
    v += head * v_head
    pos_k += head * HEAD_DIM
    pos_q += head * HEAD_DIM
    line = first + tl.arange(0, BLOCK_M)
    row = tl.minimum(line, num_rows - 1)
    since, until = segments_of(bounds, row, num_segments, halvings)
    query = load_rows(q, row, q_stride, dim, HEAD_DIM, BLOCK_D, WIDE)
    # The distance of line m and key n has index m - n + BLOCK_N - 1 in the block.
    number = tl.arange(0, BLOCK_M)[:, None] - tl.arange(0, BLOCK_N)[None, :] + (BLOCK_N - 1)
    turned = tl.arange(0, BLOCK_M)[None, :] - tl.arange(0, BLOCK_N)[:, None] + (BLOCK_N - 1)
    window = tl.arange(0, BLOCK_M + BLOCK_N) - (BLOCK_N - 1)
    best = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(tl.min(since, 0), tl.max(until, 0), BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        at = tl.minimum(key, num_rows - 1)
        keys = load_rows(k, at, k_stride, dim, HEAD_DIM, BLOCK_D, WIDE)
        away = tl.minimum(tl.maximum(first - start + window, -reach), reach)
        bucket = tl.load(buckets + reach + away)
        by_query = load_rows(pos_k, bucket, out_stride, dim, HEAD_DIM, BLOCK_D, False)
        by_key = load_rows(pos_q, bucket, out_stride, dim, HEAD_DIM, BLOCK_D, False)
        if MATERIALISE:
            result = materialised(result)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        of_query = tl.dot(query, tl.trans(by_query), input_precision="ieee")  # [BLOCK_M, BLOCK_M + BLOCK_N]
        of_key = tl.dot(keys, tl.trans(by_key), input_precision="ieee")  # [BLOCK_N, BLOCK_M + BLOCK_N]
        score += tl.gather(of_query, number, 1) + tl.trans(tl.gather(of_key, turned, 1))
        seen = (key[None, :] >= since[:, None]) & (key[None, :] < until[:, None])
        score = tl.where(seen, score * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weight, 1)
        values = load_rows(v, at, v_stride, dim, HEAD_DIM, BLOCK_D, WIDE)
        result = tl.dot(weight.to(query.dtype), values, result * fade[:, None], input_precision="ieee")
        best = higher
    to = out + line.to(tl.int64)[:, None] * out_stride + head * HEAD_DIM + dim[None, :]
    made = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(to, made, mask=(line < num_rows)[:, None] & (dim[None, :] < HEAD_DIM))


def disentangled_attention(
    q: Tensor, k: Tensor, v: Tensor, pos_k: Tensor, pos_q: Tensor, buckets: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """q, k and v [T, h, D], pos_k and pos_q [buckets, h, D], cu_seqlens [num_segments + 1] int32 -> [T, h * D], new.

    The last axis of q, k and v is contiguous, the others may be strided; pos_k and pos_q are contiguous. `buckets`
    int32 [2 * reach + 1], ascending: buckets[reach + d] is the row of pos_k and pos_q for keys d rows before the
    query; larger distances use the outermost buckets. Segments cover all rows; some may be long, some empty.
    """
    if q.is_cuda and q.dtype != torch.float64:
        return launch_disentangled(q, k, v, pos_k, pos_q, buckets, cu_seqlens, scale)
    return disentangled_attention_reference(q, k, v, pos_k, pos_q, buckets, cu_seqlens, scale)


def launch_disentangled(
    q: Tensor, k: Tensor, v: Tensor, pos_k: Tensor, pos_q: Tensor, buckets: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """The Triton kernel; arguments as `disentangled_attention`."""
    rows, heads, dim = q.shape
    segments = cu_seqlens.shape[0] - 1
    assert q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype == pos_k.dtype == pos_q.dtype
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the last axis of q, k and v must be contiguous"
    assert pos_k.shape == pos_q.shape and pos_k.shape[1:] == q.shape[1:]
    assert pos_k.is_contiguous() and pos_q.is_contiguous()
    assert buckets.dtype == cu_seqlens.dtype == torch.int32 and buckets.is_contiguous() and buckets.shape[0] % 2 == 1
    assert cu_seqlens.is_contiguous() and segments > 0
    out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    block_d = max(16, triton.next_power_of_2(dim))
    block = 64 if q.element_size() == 2 and block_d <= 64 else 32
    options = {"num_warps": 4, "num_stages": 1}  # pipelined copies take more memory than gfx1100 has
    disentangled_kernel[(heads, triton.cdiv(rows, block))](
        out, q, k, v, pos_k, pos_q, buckets, cu_seqlens, rows, segments, segments.bit_length(), buckets.shape[0] // 2,
        scale * math.log2(math.e), heads * dim, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0),
        v.stride(1), HEAD_DIM=dim, BLOCK_M=block, BLOCK_N=block, BLOCK_D=block_d,
        WIDE=rows * max(q.stride(0), k.stride(0), v.stride(0)) >= 1 << 31,
        MATERIALISE=target().arch == "sm_90", **options, **launch_options(),
    )  # fmt: skip
    return out


def disentangled_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, pos_k: Tensor, pos_q: Tensor, buckets: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads, dim = q.shape
    reach = buckets.shape[0] // 2
    made = torch.zeros(rows, heads, dim, dtype=wide, device=q.device)
    for first, last in itertools.pairwise(cu_seqlens.tolist()):
        if first == last:
            continue
        queries, keys, values = (part[first:last].to(wide).transpose(0, 1) for part in (q, k, v))  # [heads, rows, dim]
        row = torch.arange(last - first, device=q.device)
        index = buckets[(row[:, None] - row).clamp(-reach, reach) + reach].long()  # [rows, rows]
        low, high = int(index.min()), int(index.max()) + 1
        of_query, of_key = (
            part @ of[low:high].to(wide).permute(1, 2, 0) for part, of in ((queries, pos_k), (keys, pos_q))
        )  # [heads, rows, high - low]
        index = (index - low).expand(heads, -1, -1)
        scores = queries @ keys.transpose(1, 2) + of_query.gather(2, index)
        scores += of_key.gather(2, index.transpose(1, 2)).transpose(1, 2)
        made[first:last] = ((scores * scale).softmax(-1) @ values).transpose(0, 1)
    return made.to(q.dtype).view(rows, heads * dim)
