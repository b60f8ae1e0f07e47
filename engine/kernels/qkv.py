"""From the fused QKV product to rotated queries and a written cache, in one pass over the tokens of a step.

For each token: split [q | k | v]; RMSNorm each head of q and k where the model has q_norm/k_norm (Qwen3); rotate q
and k (half-split, the first D_rot of D); write k and v to their slot of the paged caches; return q. Users: every
decoder's attention layer, just before `paged_attention`.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.norm import rms_norm_reference
from engine.kernels.rope import apply_rope_reference


def qkv_rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * D] -> q [T, Hq, D], new; k and v go into k_cache and v_cache, in place.

    cos, sin [T, D_rot/2] float32; q_norm, k_norm [D] or None; caches [num_blocks, Hkv, block_size, D] of one
    dtype; slot_mapping [T] int32 or int64 = block * block_size + offset. A negative slot is not written.
    """
    narrow = qkv.dtype is torch.bfloat16
    if not qkv.is_cpu or not (narrow or qkv.dtype is torch.float32) or head_dim > cpu.HEAD_MAX:
        return qkv_rope_store_reference(
            qkv, cos, sin, q_norm, k_norm, eps, num_heads, num_kv_heads, head_dim, k_cache, v_cache, slot_mapping
        )
    tokens, width = qkv.shape
    half, block_size = cos.shape[-1], k_cache.shape[2]
    assert width == (num_heads + 2 * num_kv_heads) * head_dim and qkv.stride(1) == 1 and 2 * half <= head_dim
    assert cos.numel() == sin.numel() == tokens * half and slot_mapping.numel() == tokens
    assert cos.is_contiguous() and sin.is_contiguous() and slot_mapping.is_contiguous()
    assert k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous()
    q = qkv.new_empty(tokens, num_heads, head_dim)
    cpu.qkv_rope_store(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
        slot_mapping.data_ptr(),
        tokens, qkv.stride(0), num_heads, num_kv_heads, head_dim, half, block_size, eps,
        narrow, q_norm is not None and q_norm.dtype is torch.bfloat16,
        k_cache.dtype is torch.bfloat16, slot_mapping.dtype is torch.int64,
    )  # fmt: skip
    return q


def qkv_rope_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm_reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm_reference(k, k_norm, eps)
    q, k = apply_rope_reference(q, cos, sin), apply_rope_reference(k, cos, sin)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block_size = k_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = k[kept].to(k_cache.dtype)
    v_cache[block, :, offset] = v[kept].to(v_cache.dtype)
    return q
