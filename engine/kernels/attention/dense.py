"""Attention inside segments of one sequence of rows, without a cache: for towers and bidirectional texts.

out[t] = sum_j softmax_j(scale * q[t] . k[j]) v[j] over the rows j of t's segment (and j <= t when causal, and
|t - j| < window if there is a window). A bias per head and distance may be added to the scores. Windows of towers are
additional, shorter segments. On an accelerator the host knows only the mean length of segments. If it is short, a
program computes one segment, tile by tile. Else a program computes one tile of rows, and each row finds its segment
by bisection. Only blocks with keys that some row of a tile does not see need a mask. Head dimensions 72 and 80 are
split into 64 + 16, because blocks are powers of two. Users: `engine/encoders/*`, `engine/layers/attention`,
`engine/models/base/encoder`.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from _fast import cpu
from engine.kernels.attention.attend import materialised
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

SHORT_MEAN = 128  # rows; windows of vision towers have 64, chunks of audio towers 100


@triton.jit
def segments_of(bounds, row, num_segments, halvings):
    """The first row and the end of each row's segment."""
    segment = row * 0  # the last segment that begins at or before the row: bisection between it and `above`
    above = segment + num_segments
    for _ in range(halvings):
        middle = (segment + above) // 2
        after = tl.load(bounds + middle) <= row
        segment = tl.where(after, middle, segment)
        above = tl.where(after, above, middle)
    return tl.load(bounds + segment), tl.load(bounds + segment + 1)


@triton.jit
def load_rows(base, row, stride, dim, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """[rows, BLOCK_D] of one head; columns past HEAD_DIM are zero."""
    if WIDE:
        row = row.to(tl.int64)
    where = row[:, None] * stride + dim[None, :]
    if HEAD_DIM == BLOCK_D:
        return tl.load(base + where)
    else:
        return tl.load(base + where, mask=dim[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def attend_rows(
    query,  # [BLOCK_M, BLOCK_D]
    query_rest,  # [BLOCK_M, REST]; without REST unused
    since,  # [BLOCK_M] int32: first key of a line's segment
    until,  # [BLOCK_M] int32: last key + 1 of a line's segment
    line,  # [BLOCK_M] int32: rows of the queries; read with REACH only
    bias,  # float32 [2 REACH + 1] of the head, or None
    k,
    v,
    num_rows,
    k_stride,
    v_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    MATERIALISE: tl.constexpr,
    REACH: tl.constexpr,
):
    """Attends to the keys of all lines -> result [BLOCK_M, BLOCK_D] and result_rest [BLOCK_M, REST], float32.

    STAGES must be at least 2: without a pipeline Triton 3.6 computes wrong products with REST on sm_90.
    """
    main: tl.constexpr = BLOCK_D if REST > 0 else HEAD_DIM
    dim = tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    result_rest = tl.zeros([BLOCK_M, REST if REST > 0 else 1], tl.float32)
    low, high = tl.min(since, 0), tl.max(until, 0)
    all_since, all_until = tl.max(since, 0), tl.min(until, 0)  # every line sees the keys between
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        row = tl.minimum(key, num_rows - 1)
        keys = load_rows(k, row, k_stride, dim, main, BLOCK_D, WIDE)
        if MATERIALISE:
            result = materialised(result)
            if REST > 0:
                result_rest = materialised(result_rest)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if REST > 0:
            rest = load_rows(k + main, row, k_stride, tl.arange(0, REST), HEAD_DIM - main, REST, WIDE)
            score = tl.dot(query_rest, tl.trans(rest), score, input_precision="ieee")
        if REACH > 0:
            away = tl.minimum(tl.maximum(key[None, :] - line[:, None], -REACH), REACH)
            score = score * scale + tl.load(bias + REACH + away) * 1.4426950408889634  # log2(e)
        if (start < all_since) | (start + BLOCK_N > all_until):
            seen = (key[None, :] >= since[:, None]) & (key[None, :] < until[:, None])
            score = tl.where(seen, score, float("-inf"))
        if REACH > 0:
            higher = tl.maximum(best, tl.max(score, 1))
            weight = tl.exp2(score - higher[:, None])
        else:
            higher = tl.maximum(best, tl.max(score, 1) * scale)
            weight = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weight, 1)
        weight = weight.to(query.dtype)
        values = load_rows(v, row, v_stride, dim, main, BLOCK_D, WIDE)
        result = tl.dot(weight, values, result * fade[:, None], input_precision="ieee")
        if REST > 0:
            rest = load_rows(v + main, row, v_stride, tl.arange(0, REST), HEAD_DIM - main, REST, WIDE)
            result_rest = tl.dot(weight, rest, result_rest * fade[:, None], input_precision="ieee")
        best = higher
    return result / total[:, None], result_rest / total[:, None]


# These numbers differ between pictures and audios, and must not cause recompilation.
@triton.jit(do_not_specialize=["num_rows", "num_segments", "halvings"])
def dense_kernel(
    out,  # [num_rows, num_heads, HEAD_DIM], rows out_stride apart
    q,  # [num_rows, num_heads, HEAD_DIM], strided
    k,  # [num_rows, num_kv_heads, HEAD_DIM], strided
    v,
    bounds,  # [num_segments + 1] int32
    bias,  # [num_heads, 2 REACH + 1] float32, or None
    num_rows,
    num_segments,
    halvings,  # steps of the bisection over num_segments
    scale,  # factor of scores to base-2 exponents
    out_stride,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    UNIT: tl.constexpr,  # unit of q_head, k_head and v_head, so that the compiler knows the alignment of heads
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # rows that a row sees on each side, including itself; 0: all
    SHORT: tl.constexpr,  # a program computes a segment; else BLOCK_M rows
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two: the whole head, or with REST its first dimensions
    REST: tl.constexpr,  # 0, or a power of two for the remaining dimensions
    WIDE: tl.constexpr,  # offsets into q, k or v pass 2^31; 32 bits are faster
    STAGES: tl.constexpr,
    MATERIALISE: tl.constexpr,  # see `materialised`; CUDA only
    OVERLAP: tl.constexpr,
    REACH: tl.constexpr,  # largest distance with a separate bias; 0: no bias
):
    grid_wait(OVERLAP)
    head = tl.program_id(0)
    main: tl.constexpr = BLOCK_D if REST > 0 else HEAD_DIM
    dim = tl.arange(0, BLOCK_D)
    rest = tl.arange(0, REST if REST > 0 else 1)
    q += head * q_head * UNIT
    k += head // GROUP * k_head * UNIT
    v += head // GROUP * v_head * UNIT
    if REACH > 0:
        bias += head * (2 * REACH + 1)
    if SHORT:
        first, last = tl.load(bounds + tl.program_id(1)), tl.load(bounds + tl.program_id(1) + 1)
    else:
        first = tl.program_id(1) * BLOCK_M
        last = tl.minimum(first + BLOCK_M, num_rows)
    for tile in range(first, last, BLOCK_M):
        line = tile + tl.arange(0, BLOCK_M)
        row = tl.minimum(line, last - 1)
        if SHORT:
            since, until = row * 0 + first, row * 0 + last
        else:
            since, until = segments_of(bounds, row, num_segments, halvings)
        if CAUSAL:
            until = row + 1
        if WINDOW > 0:
            since = tl.maximum(since, row - (WINDOW - 1))
            until = tl.minimum(until, row + WINDOW)
        query = load_rows(q, row, q_stride, dim, main, BLOCK_D, WIDE)
        query_rest = query
        if REST > 0:
            query_rest = load_rows(q + main, row, q_stride, rest, HEAD_DIM - main, REST, WIDE)
        result, result_rest = attend_rows(
            query, query_rest, since, until, row, bias, k, v, num_rows, k_stride, v_stride, scale,
            HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, REST, WIDE, STAGES, MATERIALISE, REACH,
        )  # fmt: skip
        to = out + line.to(tl.int64)[:, None] * out_stride + head * HEAD_DIM
        written = (line < last)[:, None]
        tl.store(to + dim[None, :], result.to(out.dtype.element_ty), mask=written & (dim[None, :] < main))
        if REST > 0:
            inside = written & (rest[None, :] < HEAD_DIM - main)
            tl.store(to + main + rest[None, :], result_rest.to(out.dtype.element_ty), mask=inside)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    causal: bool = False,
    out: Tensor | None = None,
    mixed_lengths: bool = False,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """q [T, h, D], k and v [T, h_kv, D] (h_kv divides h), cu_seqlens [num_segments + 1] int32 -> [T, h * D].

    The last axis of q, k and v is contiguous; the others may be strided (slices of one fused projection). Segments must
    cover all rows: cu_seqlens starts at 0 and ends at T. The result is new, or `out`, whose rows may be strided. With
    `mixed_lengths` segments may differ much from the mean length, and some may be empty. `window`: rows that a row sees
    on each side, including itself; 0: all. `bias` float32 [h, 2 * reach + 1], contiguous: bias[:, reach + d] is added
    to the scores of keys d rows after the query, for d from -reach to reach; larger distances use the outermost biases.
    """
    rows, heads, dim = q.shape
    if q.is_cuda and q.dtype != torch.float64:
        return launch_dense(q, k, v, cu_seqlens, scale, causal, out, mixed_lengths, window, bias)
    if not q.is_cpu or (q.dtype != torch.float32 and q.dtype != torch.bfloat16) or dim > cpu.HEAD_MAX:
        return dense_attention_reference(q, k, v, cu_seqlens, scale, causal, out, window, bias)
    kv_heads = k.shape[1]
    assert k.shape == v.shape == (rows, kv_heads, dim) and heads % kv_heads == 0 and q.dtype == k.dtype == v.dtype
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the last axis of q, k and v must be contiguous"
    starts = cu_seqlens.to(torch.int32).contiguous()
    whole = out if out is not None and out.is_contiguous() else q.new_empty(rows, heads * dim)
    assert whole.shape == (rows, heads * dim) and whole.dtype == q.dtype
    cpu.dense_attention(
        whole.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), starts.data_ptr(),
        starts.numel() - 1, heads, kv_heads, dim,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        scale, causal, window, q.dtype == torch.bfloat16,
        0 if bias is None else bias.data_ptr(), reach_of(bias, heads),
    )  # fmt: skip
    return whole if out is None or out is whole else out.copy_(whole)


def launch_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    causal: bool,
    out: Tensor | None = None,
    mixed_lengths: bool = False,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """The Triton kernel; arguments as `dense_attention`."""
    rows, heads, dim = q.shape
    kv_heads, segments = k.shape[1], cu_seqlens.shape[0] - 1
    assert k.shape == v.shape == (rows, kv_heads, dim) and heads % kv_heads == 0 and q.dtype == k.dtype == v.dtype
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the last axis of q, k and v must be contiguous"
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous() and segments > 0
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    assert out.shape == (rows, heads * dim) and out.dtype == q.dtype and out.stride(1) == 1
    unit = math.gcd(16, q.stride(1), k.stride(1), v.stride(1))
    block_d, rest = head_blocks(dim) if unit >= 8 and all(map(_is_aligned, (q, k, v))) else (whole_block(dim), 0)
    short = rows <= SHORT_MEAN * segments and not mixed_lengths
    block_m, block_n, options = _tuned(block_d, rest, q.element_size(), short)
    dense_kernel[(heads, segments if short else triton.cdiv(rows, block_m))](
        out, q, k, v, cu_seqlens, bias, rows, segments, segments.bit_length(), scale * math.log2(math.e),
        out.stride(0), q.stride(0), q.stride(1) // unit, k.stride(0), k.stride(1) // unit, v.stride(0),
        v.stride(1) // unit, UNIT=unit, CAUSAL=causal, WINDOW=window, SHORT=short, GROUP=heads // kv_heads,
        HEAD_DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, REST=rest,
        WIDE=rows * max(q.stride(0), k.stride(0), v.stride(0)) >= 1 << 31,
        STAGES=options["num_stages"], MATERIALISE=target().arch == "sm_90", REACH=reach_of(bias, heads),
        **options, **launch_options(),
    )  # fmt: skip
    return out


def _is_aligned(rows: Tensor) -> bool:
    """Whether the compiler can see that rows are 16-byte aligned, from arguments divisible by 16.

    Otherwise Triton 3.6 reads REST from beyond its shared memory (head dimension 72 on an H100).
    """
    return rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0


def reach_of(bias: Tensor | None, heads: int) -> int:
    """The largest distance with a separate bias; 0 without a bias."""
    if bias is None:
        return 0
    assert bias.dtype == torch.float32 and bias.is_contiguous(), "a bias is float32 and contiguous"
    assert bias.shape[0] == heads and bias.shape[1] % 2 == 1 and bias.shape[1] > 1, "a bias is [heads, 2 * reach + 1]"
    return bias.shape[1] // 2


def whole_block(dim: int) -> int:
    """BLOCK_D without a rest."""
    return max(16, triton.next_power_of_2(dim))


def head_blocks(dim: int) -> tuple[int, int]:
    """(BLOCK_D, REST): a head slightly wider than a power of two is split into the power and a small rest."""
    whole = whole_block(dim)
    rest = max(16, triton.next_power_of_2(dim - whole // 2))
    return (whole // 2, rest) if whole > 64 and rest < whole // 2 else (whole, 0)


def _tuned(block_d: int, rest: int, element_size: int, short: bool) -> tuple[int, int, dict[str, int]]:
    """(rows of a tile, keys of a block, launch options)."""
    if block_d > 128 or element_size > 2:
        return 64, 32, {"num_warps": 4, "num_stages": 2}
    if short:
        return 64, 32 if rest else 64, {"num_warps": 4, "num_stages": 2}
    if target().arch != "sm_90":
        return 128, 64, {"num_warps": 8, "num_stages": 2}
    # With narrow heads two tiles fit on a unit: one multiplies while the other waits.
    pair = {"maxnreg": 128} if block_d <= 64 else {}
    return 128, 64, {"num_warps": 8, "num_stages": 3, **pair}


def dense_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    causal: bool = False,
    out: Tensor | None = None,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    made = torch.zeros(num_rows, num_heads, head_dim, dtype=wide, device=q.device)
    bounds = cu_seqlens.tolist()
    for first, last in itertools.pairwise(bounds):
        keys = k[first:last].to(wide).repeat_interleave(group, 1)
        values = v[first:last].to(wide).repeat_interleave(group, 1)
        scores = torch.einsum("thd,jhd->htj", q[first:last].to(wide), keys) * scale
        if bias is not None:
            reach, row = reach_of(bias, num_heads), torch.arange(last - first, device=q.device)
            scores = scores + bias[:, (row - row[:, None]).clamp(-reach, reach) + reach].to(wide)
        if causal:
            size = last - first
            hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        if window:
            row = torch.arange(last - first, device=q.device)
            scores = scores.masked_fill((row[:, None] - row).abs() >= window, float("-inf"))
        made[first:last] = torch.einsum("htj,jhd->thd", scores.softmax(-1), values)
    whole = made.to(q.dtype).view(num_rows, num_heads * head_dim)
    return whole if out is None else out.copy_(whole)
