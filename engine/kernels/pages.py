"""How kernels see a paged cache: blocks at a stride of their own, each block's numbers side by side.

    keys, values  [num_blocks, num_kv_heads, block_size, head_dim]
    strides       (block_stride, block_size * head_dim, head_dim, 1), in numbers

A block's keys and values may lie in one page, and the pages of all layers in one run of bytes: then block_stride is
larger than a block. Users: launchers of kernels that write the cache (rotate.py) and read it (attention/).
"""

from __future__ import annotations

from torch import Tensor


def check_pages(keys: Tensor, values: Tensor, head_dim: int) -> None:
    """Both views have one layout: a kernel takes the stride of the keys for both."""
    _, _, block_size, dim = keys.shape
    assert keys.dtype is values.dtype, f"keys are {keys.dtype}, values {values.dtype}"
    assert keys.shape == values.shape, f"keys {list(keys.shape)} and values {list(values.shape)} differ"
    assert keys.stride() == values.stride(), f"strides of keys {keys.stride()} and values {values.stride()} differ"
    assert dim == head_dim, f"the cache has heads of {dim}, the queries heads of {head_dim}"
    assert keys.stride()[1:] == (block_size * dim, dim, 1), f"a block's numbers are apart: strides {keys.stride()}"


def is_wide(keys: Tensor) -> bool:
    """Whether offsets into the cache pass 2^31."""
    return keys.shape[0] * keys.stride(0) >= 1 << 31
