"""Causal attention of a step's queries over a paged cache; prefill, chunk and decode rows mixed in one call.

out[t] = sum_j softmax_j(cap(scale * q[t] . k[j])) v[j] over positions j <= p(t). If window > 0, also j > p(t) - window.
If window < 0, j is in p(t)'s chunk of -window positions. If the step's meta has `last_keys`, j <= last_keys[t] instead,
or all j <= ~last_keys[t] if last_keys[t] < 0; if it is `whole`, j up to the row's last. If it has `first_key`, also
j >= first_key, and the result of a token that sees no key may be anything. cap(s) = softcap * tanh(s / softcap) if
softcap > 0. Query head h reads the KV head h // (Hq / Hkv). A sink is a learned logit per query head, neither scaled
nor capped, that is added to the softmax's denominator and has no value, so weights sum to less than one.
Users: every decoder's attention layer, after `qkv_rope_store` has written this step's keys and values.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from _fast import cpu
from engine.attention.meta import AttentionMeta
from engine.kernels.attention.decode import attend_parts
from engine.kernels.attention.prefill import attend_tiles
from engine.kernels.pages import FORMS, Scales, addresses, check_pages, decode
from engine.kernels.room import empty_rows


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """q [T, Hq, D], caches [num_blocks, Hkv, block_size, D] -> a new [T, Hq * D] of q's dtype; sinks [Hq] float32.

    Strides of the caches, and scales of codes, as in kernels/pages.py. The result is not written for tokens without a
    row (beyond query_start[-1]).
    """
    tokens, heads, dim = q.shape
    check_pages(k_cache, v_cache, dim, scales)
    assert heads % k_cache.shape[1] == 0 and q.is_contiguous() and meta.block_tables.dtype is torch.int32
    last_keys = ends_of(meta, tokens) if meta.whole and q.is_cpu else meta.last_keys
    assert window >= 0 or last_keys is None, "tokens of a chunk see none behind them"
    assert last_keys is None or (last_keys.numel() >= tokens and last_keys.dtype is torch.int32)
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype is torch.float32 and sinks.is_contiguous())
    narrow = q.dtype is torch.bfloat16
    if not q.is_cpu or not (narrow or q.dtype is torch.float32) or dim > cpu.HEAD_MAX:
        if q.is_cuda:
            return launch_paged(q, k_cache, v_cache, meta, scale, window, softcap, sinks, scales).view(tokens, -1)
        return paged_attention_reference(q, k_cache, v_cache, meta, scale, window, softcap, sinks, scales)
    _, kv_heads, block_size, _ = k_cache.shape
    # The C kernel reads line r for row r; table_row occurs here only in tests of the device path.
    tables = meta.block_tables if meta.table_row is None else meta.block_tables[meta.table_row]
    rows, max_blocks = tables.shape
    assert meta.query_start.numel() == rows + 1 and meta.context_len.numel() == rows and tables.is_contiguous()
    out = q.new_empty(tokens, heads * dim)
    cpu.paged_attention(
        out.data_ptr(), q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        tables.data_ptr(), meta.query_start.data_ptr(), meta.context_len.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), 0 if last_keys is None else last_keys.data_ptr(),
        rows, heads, kv_heads, dim, max_blocks, block_size, k_cache.stride(0),
        window, scale, softcap, narrow, FORMS[k_cache.dtype], *addresses(scales), meta.first_key,
    )  # fmt: skip
    return out


def ends_of(meta: AttentionMeta, tokens: int) -> Tensor:
    """The last key of each token's row, int32 [tokens], as AttentionMeta.last_keys; 0 for tokens without a row."""
    counts = meta.query_start.diff()
    found = meta.context_len.new_zeros(tokens)
    found[: int(counts.sum())] = (meta.context_len - 1).repeat_interleave(counts)
    return found


def launch_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    scales: Scales | None = None,
) -> Tensor:
    """Runs the Triton kernels over the step's work lists -> [T, Hq, D]: tiles of long rows, parts of decode rows."""
    work, tables = meta.work, meta.block_tables
    assert work is not None, "an accelerator's step makes its work lists before the first layer"
    out = empty_rows(q.view(len(q), -1), q[0].numel()).view(q.shape)
    rest = (scale, window, softcap, sinks, scales)
    if not (meta.decode_only or meta.cut):
        bounds = meta.last_keys, meta.first_key
        attend_tiles(out, q, k_cache, v_cache, tables, work, meta.context_len.shape[0], *rest, *bounds)
    attend_parts(out, q, k_cache, v_cache, tables, work, *rest, single=meta.decode_only, whole=meta.whole)
    return out


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k_cache.shape[1]
    block_size = k_cache.shape[2]
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=wide, device=q.device)
    starts = meta.query_start.tolist()
    k_scale, v_scale = scales or (None, None)
    for row, length in enumerate(meta.context_len.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        line = row if meta.table_row is None else int(meta.table_row[row])
        blocks = meta.block_tables[line, : -(-length // block_size)].long()
        # [num_blocks, Hkv, block_size, D] -> [Hq, length, D]
        k, v = (
            decode(cache[blocks], None if factors is None else factors[blocks], wide)
            .transpose(0, 1)
            .reshape(cache.shape[1], -1, head_dim)[:, :length]
            .repeat_interleave(group, 0)
            for cache, factors in ((k_cache, k_scale), (v_cache, v_scale))
        )
        k[:, : meta.first_key], v[:, : meta.first_key] = 0, 0  # may be anything, and no zero weight removes a NaN
        scores = torch.einsum("thd,hjd->htj", q[first:last].to(wide), k) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(length - (last - first), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)[None, :]
        last_keys = ends_of(meta, num_tokens) if meta.whole else meta.last_keys
        seen = position if last_keys is None else last_keys[first:last].to(position)[:, None]
        hidden = (key > torch.where(seen < 0, ~seen, seen)) | (key < meta.first_key)
        if window > 0:
            hidden = hidden | ((key <= position - window) & (seen >= 0))
        if window < 0:
            hidden = hidden | (key < position // -window * -window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(-1, last - first, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        out[first:last] = torch.einsum("htj,hjd->thd", weights, v)
    return out.to(q.dtype).view(num_tokens, num_heads * head_dim)
