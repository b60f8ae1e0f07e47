"""Attention inside segments of one sequence of rows, without a cache: vision and audio towers.

out[t] = sum_j softmax_j(scale * q[t] . k[j]) v[j] over the rows j of t's segment (and j <= t when causal). Windows are
more, shorter segments. Users: `engine/encoders/*`.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import itertools

import torch
from torch import Tensor

from _fast import cpu


def dense_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = False) -> Tensor:
    """q [T, h, D], k and v [T, h_kv, D] (h_kv divides h), cu_seqlens [num_segments + 1] int32 -> a new [T, h * D].

    The last axis of q, k and v is contiguous; the others may be strided (slices of one fused product). Segments must
    cover all rows: cu_seqlens starts at 0 and ends at T.
    """
    rows, heads, dim = q.shape
    if not q.is_cpu or (q.dtype != torch.float32 and q.dtype != torch.bfloat16) or dim > cpu.HEAD_MAX:
        return dense_attention_reference(q, k, v, cu_seqlens, scale, causal)
    kv_heads = k.shape[1]
    assert k.shape == v.shape == (rows, kv_heads, dim) and heads % kv_heads == 0 and q.dtype == k.dtype == v.dtype
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the last axis of q, k and v must be contiguous"
    starts = cu_seqlens.to(torch.int32).contiguous()
    out = q.new_empty(rows, heads * dim)
    cpu.dense_attention(
        out.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), starts.data_ptr(),
        starts.numel() - 1, heads, kv_heads, dim,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        scale, causal, q.dtype == torch.bfloat16,
    )  # fmt: skip
    return out


def dense_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = False
) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    out = torch.zeros(num_rows, num_heads, head_dim, dtype=wide, device=q.device)
    bounds = cu_seqlens.tolist()
    for first, last in itertools.pairwise(bounds):
        keys = k[first:last].to(wide).repeat_interleave(group, 1)
        values = v[first:last].to(wide).repeat_interleave(group, 1)
        scores = torch.einsum("thd,jhd->htj", q[first:last].to(wide), keys) * scale
        if causal:
            size = last - first
            hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        out[first:last] = torch.einsum("htj,jhd->thd", scores.softmax(-1), values)
    return out.to(q.dtype).view(num_rows, num_heads * head_dim)
