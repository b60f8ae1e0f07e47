"""Rotation of heads; for decoders one pass that turns the fused QKV product into rotated queries and a written cache.

    (a, b) -> (a cos - b sin, b cos + a sin) with a = x[j], b = x[j + D_rot/2]; half-split, as Llama and Qwen

For each token: split [q | k | v]; apply RMSNorm to each head of q and k if the model has q_norm/k_norm (Qwen3); rotate
the first D_rot of D columns of q and k (before the norm in models with a late norm, HunYuan); write k and v to their
slots in the paged caches; return q. Users: every decoder's attention layer, just before `paged_attention`. Towers, and
text models whose tokens attend to later tokens, rotate their heads with `apply_rope`.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.float8 import as_bytes, codes_of, narrow8
from engine.kernels.norm import rms_norm_reference
from engine.kernels.pages import FORMS, Scales, addresses, check_pages, encode, stride_of
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

VALUES = 2048  # values per program, constant because it determines the order in which a head's squares are added


@triton.jit
def norm_pairs(
    a, b, rest, weight, pair, more, eps, dtype,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """RMSNorm of heads [HEADS, pairs] that are in three pieces."""
    total = tl.sum(a * a + b * b, 1)
    if REST:
        total += tl.sum(rest * rest, 1)
        rest_weight = tl.load(weight + more, mask=more < HEAD_DIM, other=0.0).to(tl.float32)
    scale = (1.0 / tl.sqrt_rn(total / HEAD_DIM + eps))[:, None]
    a = a * scale * tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    b = b * scale * tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    # Rounded as a separate norm would round.
    a = a.to(dtype).to(tl.float32)
    b = b.to(dtype).to(tl.float32)
    if REST:
        rest = rest * scale * rest_weight
    return a, b, rest


@triton.jit
def power_from(x):
    """Return the least power of two >= x; x is a normal float32 above 0, or infinity."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def over_scale(a, b, rest, place, mask, MADE: tl.constexpr, REST: tl.constexpr):
    """Divide heads [HEADS, pairs], in three pieces, by their scales [HEADS, 1].

    MADE: compute and write the scales: the least powers of two that bring the largest number to at most the largest
    code. Powers of two lose no bits in codes, and attention can multiply by them exactly. Else: read the scales.
    """
    if MADE:
        most = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        if REST:
            most = tl.maximum(most, tl.max(tl.abs(rest), 1))
        most = most[:, None]
        scale = tl.where(most > 1e-30, power_from(tl.div_rn(most, tl.full(most.shape, 448.0, tl.float32))), 1.0)
        tl.store(place, scale, mask=mask)
    else:
        scale = tl.load(place, mask=mask, other=1.0)
    a = tl.div_rn(a, tl.broadcast_to(scale, a.shape))
    b = tl.div_rn(b, tl.broadcast_to(scale, b.shape))
    if REST:
        rest = tl.div_rn(rest, tl.broadcast_to(scale, rest.shape))
    return a, b, rest


@triton.jit
def as_cached(values, cache, CODES: tl.constexpr):
    """Convert float32 values to the cache's type."""
    return narrow8(values, CODES) if CODES else values.to(cache.dtype.element_ty)


@triton.jit
def qkv_kernel(
    q_out,  # [num_tokens, num_heads, head_dim]
    k_cache,  # [num_blocks, num_kv_heads, block_size, head_dim], blocks block_stride apart
    v_cache,
    qkv,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows qkv_stride apart
    cos,  # [num_tokens, half] float32
    sin,
    q_norm,  # [head_dim] when NORM
    k_norm,
    slot_mapping,  # [num_tokens]
    k_scale,  # for codes: float32 [num_blocks, num_kv_heads, block_size], written, or [num_kv_heads], read; else None
    v_scale,
    qkv_stride,
    block_stride,
    scale_stride,  # stride of k_scale and v_scale between blocks
    num_heads,
    num_kv_heads,
    block_size,
    num_slots,  # slots of the caches: num_blocks * block_size
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # rotated pairs; 2 * HALF <= HEAD_DIM
    NORM: tl.constexpr,
    LATE: tl.constexpr,  # the norm comes after the rotation
    STORE: tl.constexpr,  # False: rotate only, no caches
    CODES: tl.constexpr,  # a constant of float8.py
    MADE: tl.constexpr,  # each token has its own scales
    HEADS: tl.constexpr,  # heads per program, power of two
    BLOCK: tl.constexpr,  # power of two >= HALF
    REST: tl.constexpr,  # power of two >= HEAD_DIM - 2 * HALF; 0 if everything is rotated
    OVERLAP: tl.constexpr,
):
    """A program handles HEADS heads of q, k or v of one token, [HEADS, pairs]: q's programs come first, then k's,
    v's."""
    grid_wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups, kv_groups = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    is_query, is_value = group < q_groups, group >= q_groups + kv_groups
    group = tl.where(is_query, group, (group - q_groups) % kv_groups)  # group within q, k or v
    count = tl.where(is_query, num_heads, num_kv_heads)
    before = tl.where(is_query, 0, num_heads) + tl.where(is_value, num_kv_heads, 0)
    head = (group * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (head < count) & (pair < HALF)
    source = qkv + token * qkv_stride + (before + head) * HEAD_DIM
    a = tl.load(source + pair, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    rest, more = a, pair
    if REST:
        more = 2 * HALF + tl.arange(0, REST)[None, :]
        more_mask = (head < count) & (more < HEAD_DIM)
        rest = tl.load(source + more, mask=more_mask, other=0.0).to(tl.float32)
    if not is_value:
        c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)
        s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)
        if NORM and not LATE:
            weight = q_norm if is_query else k_norm
            a, b, rest = norm_pairs(a, b, rest, weight, pair, more, eps, qkv.dtype.element_ty, HEAD_DIM, HALF, REST)
        turned = a * c - b * s
        b = b * c + a * s
        a = turned
        if LATE:
            weight = q_norm if is_query else k_norm
            a, b, rest = norm_pairs(a, b, rest, weight, pair, more, eps, qkv.dtype.element_ty, HEAD_DIM, HALF, REST)
    if is_query:
        target = q_out + (token * num_heads + head) * HEAD_DIM
        tl.store(target + pair, a.to(q_out.dtype.element_ty), mask=mask)
        tl.store(target + HALF + pair, b.to(q_out.dtype.element_ty), mask=mask)
        if REST:
            tl.store(target + more, rest.to(q_out.dtype.element_ty), mask=more_mask)
    elif STORE:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        real = tl.where((slot >= 0) & (slot < num_slots), num_kv_heads, 0)
        cache = v_cache if is_value else k_cache
        line = head * block_size + slot % block_size
        page = cache + slot // block_size * block_stride + line * HEAD_DIM
        mask = (head < real) & (pair < HALF)
        if k_scale is not None:
            place = slot // block_size * scale_stride + (line if MADE else head)
            a, b, rest = over_scale(a, b, rest, (v_scale if is_value else k_scale) + place, head < real, MADE, REST)
        tl.store(page + pair, as_cached(a, cache, CODES), mask=mask)
        tl.store(page + HALF + pair, as_cached(b, cache, CODES), mask=mask)
        if REST:
            tl.store(page + more, as_cached(rest, cache, CODES), mask=(head < real) & (more < HEAD_DIM))


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
    late: bool = False,
    scales: Scales | None = None,
) -> Tensor:
    """Turn qkv [T, (Hq + 2 Hkv) * D] into a new q [T, Hq, D]; write k and v into k_cache and v_cache.

    cos, sin [T, D_rot/2] float32; q_norm, k_norm [D] or None, applied before rotation or, `late`, after it; caches
    [num_blocks, Hkv, block_size, D] and scales as in kernels/pages.py; slot_mapping [T] int32 or int64 =
    block * block_size + offset; a negative slot is skipped.
    """
    narrow = qkv.dtype is torch.bfloat16
    if not qkv.is_cpu or not (narrow or qkv.dtype is torch.float32) or head_dim > cpu.HEAD_MAX or late:
        args = (qkv, cos, sin, q_norm, k_norm, eps, num_heads, num_kv_heads, head_dim, k_cache, v_cache, slot_mapping)
        return (launch_qkv if qkv.is_cuda else qkv_rope_store_reference)(*args, late, scales)
    tokens, width = qkv.shape
    half, block_size = cos.shape[-1], k_cache.shape[2]
    assert width == (num_heads + 2 * num_kv_heads) * head_dim and qkv.stride(1) == 1 and 2 * half <= head_dim
    assert cos.numel() == sin.numel() == tokens * half and slot_mapping.numel() == tokens
    assert cos.is_contiguous() and sin.is_contiguous() and slot_mapping.is_contiguous()
    check_pages(k_cache, v_cache, head_dim, scales)
    q = qkv.new_empty(tokens, num_heads, head_dim)
    cpu.qkv_rope_store(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
        slot_mapping.data_ptr(),
        tokens, qkv.stride(0), num_heads, num_kv_heads, head_dim, half, block_size, k_cache.stride(0), eps,
        narrow, q_norm is not None and q_norm.dtype is torch.bfloat16,
        FORMS[k_cache.dtype], slot_mapping.dtype is torch.int64, *addresses(scales),
    )  # fmt: skip
    return q


def launch_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    late: bool = False,
    scales: Scales | None = None,
) -> Tensor:
    """Launch the Triton kernel; without caches (and num_kv_heads 0) it only rotates. Shapes as `qkv_rope_store`."""
    tokens, half = qkv.shape[0], cos.shape[-1]
    assert qkv.stride(-1) == 1 and cos.is_contiguous() and sin.is_contiguous() and (q_norm is None) == (k_norm is None)
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    rest = head_dim - 2 * half
    heads = max(1, min(triton.next_power_of_2(num_heads or num_kv_heads), VALUES // triton.next_power_of_2(head_dim)))
    groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    store = k_cache is not None and v_cache is not None
    num_slots, block_size, block_stride, codes = 0, 1, 0, 0
    keys, values = q, q
    if k_cache is not None and v_cache is not None:
        check_pages(k_cache, v_cache, head_dim, scales)
        block_size, block_stride = k_cache.shape[2], k_cache.stride(0)
        num_slots = k_cache.shape[0] * block_size
        keys, values, codes = as_bytes(k_cache), as_bytes(v_cache), codes_of(k_cache, target())
    qkv_kernel[(tokens, groups)](
        q, keys, values, qkv, cos, sin,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, slot_mapping if store else q,
        *(scales or (None, None)), qkv.stride(0), block_stride, stride_of(scales), num_heads, max(num_kv_heads, 1),
        block_size, num_slots, eps, HEAD_DIM=head_dim, HALF=half, NORM=q_norm is not None, LATE=late, STORE=store,
        CODES=codes, MADE=stride_of(scales) > 0, HEADS=heads,
        BLOCK=triton.next_power_of_2(half), REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4, **launch_options(),
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
    late: bool = False,
    scales: Scales | None = None,
) -> Tensor:
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if late:
        q, k = apply_rope_reference(q, cos, sin), apply_rope_reference(k, cos, sin)
    if q_norm is not None:
        q = rms_norm_reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm_reference(k, k_norm, eps)
    if not late:
        q, k = apply_rope_reference(q, cos, sin), apply_rope_reference(k, cos, sin)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block_size = k_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    if k_cache.dtype.itemsize == 1:
        for heads, cache, scale in zip((k, v), (k_cache, v_cache), scales or (None, None)):
            encode(heads[kept], cache, scale, block, offset)
        return q
    k_cache[block, :, offset] = k[kept].to(k_cache.dtype)
    v_cache[block, :, offset] = v[kept].to(v_cache.dtype)
    return q


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None = None, eps: float = 0.0, late: bool = False
) -> Tensor:
    """Rotate x [T, heads, D] by cos and sin [T, D_rot/2], D_rot <= D: a new [T, heads, D]; the rest of D is copied.

    norm [D]: weight of an RMSNorm of every head before the rotation (`late`: after it); None: no norm.
    """
    tokens, heads, dim = x.shape
    if x.is_cuda:
        rows = x.reshape(tokens, heads * dim)
        return launch_qkv(
            rows, cos.float().contiguous(), sin.float().contiguous(), norm, norm, eps, heads, 0, dim, None, None, None,
            late,
        )  # fmt: skip
    if not x.is_cpu or x.dtype not in (torch.float32, torch.bfloat16) or dim > cpu.HEAD_MAX or late:
        return normed_rope_reference(x, cos, sin, norm, eps, late)
    assert x.stride(2) == 1 and x.stride(1) == dim, "the heads of a token must lie side by side"
    assert cos.shape == sin.shape == (tokens, cos.shape[1]) and 2 * cos.shape[1] <= dim
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    out = x.new_empty(tokens, heads, dim)
    weight = 0 if norm is None else norm.data_ptr()
    narrow = x.dtype == torch.bfloat16
    cpu.qkv_rope_store(
        out.data_ptr(), 0, 0, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), weight, weight, 0,
        tokens, x.stride(0), heads, 0, dim, cos.shape[1], 0, 0, eps, narrow,
        norm is not None and norm.dtype is torch.bfloat16, 0, False,
    )  # fmt: skip
    return out


def normed_rope_reference(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float, late: bool) -> Tensor:
    if norm is None:
        return apply_rope_reference(x, cos, sin)
    if late:
        return rms_norm_reference(apply_rope_reference(x, cos, sin), norm, eps)
    return apply_rope_reference(rms_norm_reference(x, norm, eps), cos, sin)


def apply_rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1).to(x.dtype)
