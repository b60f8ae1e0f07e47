"""The paged KV cache's tensors: how many blocks fit, and one pair per layer.

Owner: device thread, at start; layers read and write through the batch afterwards. Block 0 is the dummy block: padded
rows write to it and no request ever owns it.
"""

from __future__ import annotations

import torch

from engine.cache.spec import CacheSpec, FullSpec, SlidingSpec
from engine.config import EngineConfig
from engine.device import available_memory
from engine.errors import ConfigError

KIND_FULL = 0
KIND_SLIDING = 1


def bytes_per_block(specs: list[CacheSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    per_token = sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs)
    return per_token * block_size * dtype.itemsize


def group_of(specs: list[CacheSpec]) -> tuple[int, int]:
    """(kind, window) of the one block table that all layers share.

    Blocks behind the window can be dropped only when every layer has that window; otherwise all are kept and the
    layers that slide mask what they must not see.
    """
    windows = {spec.window if isinstance(spec, SlidingSpec) else 0 for spec in specs}
    if len(windows) == 1 and 0 not in windows:
        return KIND_SLIDING, windows.pop()
    return KIND_FULL, 0


def count_blocks(
    config: EngineConfig, specs: list[CacheSpec], dtype: torch.dtype, max_model_len: int, rows: int
) -> int:
    """Blocks to allocate, the dummy one included: as flags say, else from free memory, at most what rows need."""
    size = bytes_per_block(specs, config.block_size, dtype)
    longest = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override + 1
    budget = config.kv_cache_memory_bytes or available_memory() // 4
    count = min(budget // size, rows * longest)
    if count < 1:
        raise ConfigError(
            f"the KV cache got {budget / 2**30:.2f} GiB and one block takes {size / 2**30:.2f} GiB: "
            "raise --kv-cache-memory-bytes or free memory"
        )
    return count + 1


def allocate(
    specs: list[CacheSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    poison: bool,
    device: torch.device | str = "cpu",
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(keys, values) per layer, each [num_blocks, num_kv_heads, block_size, head_dim], not written yet."""
    caches = []
    for spec in specs:
        assert isinstance(spec, FullSpec | SlidingSpec)
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        pair = (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for tensor in pair:
            if poison:
                tensor.fill_(float("nan"))
        caches.append(pair)
    return caches
