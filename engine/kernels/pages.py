"""Layout of a paged cache for kernels: blocks are `block_stride` apart, each block is contiguous.

    keys, values  [num_blocks, num_kv_heads, block_size, head_dim]
    strides       (block_stride, block_size * head_dim, head_dim, 1), in numbers

A block's keys and values may share a page, and the pages of all layers may share one range of bytes: then block_stride
is larger than a block. 8-bit numbers are codes. Codes in e4m3 have float32 scales for keys and for values:

    made    [num_blocks, num_kv_heads, block_size]  one per token and head, written with the codes
    given   the same shape with strides (0, 1, 0)   one per head, from the checkpoint; read, never written

Users: launchers of kernels that write the cache (rotate.py) and read it (attention/).
"""

from __future__ import annotations

import torch
from torch import Tensor

Scales = tuple[Tensor, Tensor]  # scales of keys, scales of values
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}  # _fast/c/cpu: cache_type
NEAR_ZERO = 1e-30  # a head without a larger number gets the scale 1


def pages_of(cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Scales | None]:
    """Return keys, values and their scales from the cache of a layer with a KeyValueSpec."""
    keys, values, *scales = cache
    return keys, values, (scales[0], scales[1]) if scales else None


def check_pages(keys: Tensor, values: Tensor, head_dim: int, scales: Scales | None) -> None:
    """Check that both views have the same layout, because kernels use the keys' stride for both, and that e4m3 has
    scales."""
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
    """Check that the scales of keys and of values have the same layout, and that it matches `keys`."""
    for scale in (of_keys, of_values):
        assert scale.dtype is torch.float32, f"scales are {scale.dtype}"
        assert scale.shape == keys.shape[:3], f"scales {list(scale.shape)} of keys {list(keys.shape)}"
        assert scale.stride() == (0, 1, 0) or scale.stride()[1:] == (keys.shape[2], 1), f"scales at {scale.stride()}"
    assert of_keys.stride() == of_values.stride(), "strides of keys' and values' scales differ"


def is_wide(keys: Tensor) -> bool:
    """Whether offsets into the cache exceed 2^31."""
    return keys.shape[0] * keys.stride(0) >= 1 << 31


def stride_of(scales: Scales | None) -> int:
    """Return the stride between the scales of two blocks; 0 if scales are given or absent."""
    return 0 if scales is None else scales[0].stride(0)


def addresses(scales: Scales | None) -> tuple[int, int, int]:
    """Return the arguments of _fast/cpu: addresses of the keys' and the values' scales, and the stride of blocks."""
    return (0, 0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr(), stride_of(scales))


def given_scales(
    keys: tuple[float, ...], values: tuple[float, ...], num_blocks: int, block_size: int, device: torch.device
) -> Scales:
    """Make scales per KV head from the checkpoint's numbers, in the layout of the kernels."""
    shape = (num_blocks, len(keys), block_size)
    made = [torch.tensor(found, dtype=torch.float32, device=device) for found in (keys, values)]
    first, second = (scale.as_strided(shape, (0, 1, 0)) for scale in made)
    return first, second


def encode(heads: Tensor, cache: Tensor, scale: Tensor | None, blocks: Tensor, offsets: Tensor) -> None:
    """Store heads [T, Hkv, D] at blocks and offsets [T] of an 8-bit cache, with scales: the reference for stores."""
    most = torch.finfo(cache.dtype).max
    wide = heads.float()
    if scale is not None and scale.stride(0):
        largest = wide.abs().nan_to_num(0.0, float("inf")).amax(-1)
        power = ((largest / most).view(torch.int32) + 0x7FFFFF) & 0x7F800000  # the least power of two >= the quotient
        scale[blocks, :, offsets] = torch.where(largest > NEAR_ZERO, power.view(torch.float32), 1.0)
    if scale is not None:
        wide = wide / scale[blocks, :, offsets][..., None]
    held = wide.clamp(-most, most).masked_fill(~wide.isfinite(), float("nan"))
    cache[blocks, :, offsets] = held.to(cache.dtype)


def decode(cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a cache's values [num_blocks, Hkv, block_size, D]; codes are multiplied by their scales."""
    values = cache.to(dtype) if cache.dtype.itemsize > 1 else cache.float().to(dtype)
    return values if scale is None else values * scale.to(dtype)[..., None]
