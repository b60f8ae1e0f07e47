"""How kernels see a paged cache: blocks at a stride of their own, each block's numbers side by side.

    keys, values  [num_blocks, num_kv_heads, block_size, head_dim]
    strides       (block_stride, block_size * head_dim, head_dim, 1), in numbers

A block's keys and values may lie in one page, and the pages of all layers in one run of bytes: then block_stride is
larger than a block. Numbers of 8 bits are codes. Those of e4m3 have scales, float32, of keys and of values:

    made    [num_blocks, num_kv_heads, block_size]  one per token and head, written with its codes
    given   the same shape with strides (0, 1, 0)   one per head, from the checkpoint: read and never written

Users: launchers of kernels that write the cache (rotate.py) and read it (attention/).
"""

from __future__ import annotations

import torch
from torch import Tensor

Scales = tuple[Tensor, Tensor]  # of keys and of values
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}  # _fast/c/cpu: cache_type
NEAR_ZERO = 1e-30  # a head without a larger number gets the scale 1


def pages_of(cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Scales | None]:
    """Keys, values and the scales of both, of a layer with a KeyValueSpec."""
    keys, values, *scales = cache
    return keys, values, (scales[0], scales[1]) if scales else None


def check_pages(keys: Tensor, values: Tensor, head_dim: int, scales: Scales | None) -> None:
    """Both views have one layout: a kernel takes the stride of the keys for both. Codes of e4m3 have scales."""
    _, _, block_size, dim = keys.shape
    assert keys.dtype is values.dtype, f"keys are {keys.dtype}, values {values.dtype}"
    assert keys.shape == values.shape, f"keys {list(keys.shape)} and values {list(values.shape)} differ"
    assert keys.stride() == values.stride(), f"strides of keys {keys.stride()} and values {values.stride()} differ"
    assert dim == head_dim, f"the cache has heads of {dim}, the queries heads of {head_dim}"
    assert keys.stride()[1:] == (block_size * dim, dim, 1), f"a block's numbers are apart: strides {keys.stride()}"
    assert (scales is not None) == (keys.dtype is torch.float8_e4m3fn), f"scales of a cache of {keys.dtype}"
    if scales is not None:
        check_scales(keys, *scales)


def check_scales(keys: Tensor, of_keys: Tensor, of_values: Tensor) -> None:
    """Both have one layout, of `keys`."""
    for scale in (of_keys, of_values):
        assert scale.dtype is torch.float32, f"scales are {scale.dtype}"
        assert scale.shape == keys.shape[:3], f"scales {list(scale.shape)} of keys {list(keys.shape)}"
        assert scale.stride() == (0, 1, 0) or scale.stride()[1:] == (keys.shape[2], 1), f"scales at {scale.stride()}"
    assert of_keys.stride() == of_values.stride(), "strides of keys' and values' scales differ"


def is_wide(keys: Tensor) -> bool:
    """Whether offsets into the cache pass 2^31."""
    return keys.shape[0] * keys.stride(0) >= 1 << 31


def stride_of(scales: Scales | None) -> int:
    """From a block's scales to the next's; 0 where scales are given, or there are none."""
    return 0 if scales is None else scales[0].stride(0)


def addresses(scales: Scales | None) -> tuple[int, int, int]:
    """As _fast/cpu takes them: of keys' and of values', and the stride of blocks."""
    return (0, 0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr(), stride_of(scales))


def given_scales(
    keys: tuple[float, ...], values: tuple[float, ...], num_blocks: int, block_size: int, device: torch.device
) -> Scales:
    """Scales of each KV head, from the checkpoint, as the kernels take them."""
    shape = (num_blocks, len(keys), block_size)
    made = [torch.tensor(found, dtype=torch.float32, device=device) for found in (keys, values)]
    first, second = (scale.as_strided(shape, (0, 1, 0)) for scale in made)
    return first, second


def encode(heads: Tensor, cache: Tensor, scale: Tensor | None, blocks: Tensor, offsets: Tensor) -> None:
    """heads [T, Hkv, D] into blocks and offsets [T] of a cache of 8 bits and its scales: the reference of stores."""
    most = torch.finfo(cache.dtype).max
    wide = heads.float()
    if scale is not None and scale.stride(0):
        largest = wide.abs().nan_to_num(0.0, float("inf")).amax(-1)
        power = ((largest / most).view(torch.int32) + 0x7FFFFF) & 0x7F800000  # the least power of two that is not below
        scale[blocks, :, offsets] = torch.where(largest > NEAR_ZERO, power.view(torch.float32), 1.0)
    if scale is not None:
        wide = wide / scale[blocks, :, offsets][..., None]
    held = wide.clamp(-most, most).masked_fill(~wide.isfinite(), float("nan"))
    cache[blocks, :, offsets] = held.to(cache.dtype)


def decode(cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of a cache: numbers [num_blocks, Hkv, block_size, D], codes times their scales."""
    values = cache.to(dtype) if cache.dtype.itemsize > 1 else cache.float().to(dtype)
    return values if scale is None else values * scale.to(dtype)[..., None]
