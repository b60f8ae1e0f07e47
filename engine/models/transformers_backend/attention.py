"""The attention function that transformers' modules call: it stores keys and values in our cache and attends there.

Thread: any. The n-th call of a step uses the n-th cache (calls.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError
from engine.kernels.attention.paged import paged_attention
from engine.models.transformers_backend.calls import Call, running

NAME = "omniloop"  # this function's name in transformers' table
# Tensor arguments that attention may ignore: rotation has been applied, and masks follow from the rows.
UNREAD = frozenset({"position_ids", "cache_position", "position_embeddings", "input_ids"})


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D], key [1, kv_heads, T, D], value [1, kv_heads, T, Dv] -> [1, T, heads, Dv], no weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_meta:
        called = _called(module, query, key, value, sliding_window or 0, scale, softcap or 0.0, s_aux is not None)
        _refuse_others(module, attention_mask, is_causal, others)
        running.calls.attention.append(called)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None
    batch, number = running.batch, running.num_attention_calls
    assert batch is not None, "a forward runs inside a step"
    running.num_attention_calls = number + 1
    call = running.calls.attention[number]
    meta = batch.attention[batch.group_of[number]]
    keys, values = batch.caches[number]
    if call.value_dim < call.head_dim:
        value = functional.pad(value, (0, call.head_dim - call.value_dim))
    block_size = keys.shape[2]
    slots = meta.slot_mapping.clamp(min=0)  # tokens without a row go to the dummy block
    blocks, places = slots // block_size, slots % block_size
    keys[blocks, :, places] = key[0].transpose(0, 1).to(keys.dtype)
    values[blocks, :, places] = value[0].transpose(0, 1).to(values.dtype)
    rows = query[0].transpose(0, 1).to(keys.dtype).contiguous()  # [T, heads, D]
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    attended = paged_attention(rows, keys, values, meta, call.scale, call.window, call.softcap, sinks)
    return attended.view(rows.shape)[..., : call.value_dim].unsqueeze(0).to(query.dtype), None


def _called(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    scale: float,
    softcap: float,
    sinks: bool,
) -> Call:
    heads, kv_heads, width, value_width = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    if heads % kv_heads or key.shape[3] != width or value_width > width or value.shape[1] != kv_heads:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ConfigError(f"{type(module).__name__} attends with queries, keys and values of unlike shapes: {shapes}")
    return Call(heads, kv_heads, width, value_width, window, scale, softcap, sinks)


def _refuse_others(
    module: torch.nn.Module, mask: Tensor | None, is_causal: bool | None, others: dict[str, Any]
) -> None:
    """Raises ConfigError for arguments that the paged kernels do not support."""
    name = type(module).__name__
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{name} is not causal: each token sees those behind it, which this version does not serve")
    unknown = [key for key, found in others.items() if isinstance(found, Tensor) and key not in UNREAD]
    if mask is not None:
        unknown.append("a mask of its own")
    if unknown:
        raise ConfigError(f"{name} attends with {', '.join(unknown)}, which paged attention does not know")
