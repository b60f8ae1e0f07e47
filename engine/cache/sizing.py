"""Number of blocks of the KV cache, computed from measured bytes.

Thread: device, at start; on an accelerator after loading the weights and a profiling step. In: flags, layout,
DeviceMemory. Out: a number of blocks, or a ConfigError that names a value that fits.

    total x utilization = used now (weights, driver, others) + peak of a step + graphs + reserve + BLOCKS
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from dataclasses import dataclass

import torch

from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.cache.layout import CacheLayout
from engine.device.host_memory import available_memory
from engine.device.memory import DeviceMemory, device_memory, gib

log = logging.getLogger("omniloop.engine")

MOST_BLOCKS = 1 << 20  # more than rows can hold; a tiny model does not need a hundred million blocks
LEAST_TOKENS = 256  # a shorter context is useless
SHORT_ROW = 1024  # tokens


@dataclass(frozen=True, slots=True)
class States:
    """Memory of rows that does not depend on their number of tokens."""

    state_bytes: int  # bytes of a state in its blocks; a running row has two, and a prefix hit needs one
    tail_bytes: int  # bytes of the inputs of a row's newest tokens, in their blocks
    padding: float  # share of padding in a row's blocks
    row_tokens: int  # tokens of a short row
    rows: int  # number of short rows that fit at once


def host_blocks(config: EngineConfig, layout: CacheLayout, longest: int, rows: int, promised: int = 0) -> int:
    """Return blocks to allocate on a CPU, with the dummy block: from flags, else from free memory, up to rows' needs.

    longest: blocks of one context; promised: bytes of weights that are not loaded yet.
    """
    if not layout.keeps:
        return _empty_blocks(rows)
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override + 1
    free = available_memory() - promised
    if free < 0:
        raise ConfigError(f"the weights take {gib(promised)}, and {gib(free + promised)} of memory are free")
    budget = config.kv_cache_memory_bytes or free // 4
    count = min(budget // layout.block_bytes, rows * (longest + layout.checkpoint_blocks))
    if count < 1:
        raise ConfigError(
            f"the KV cache got {budget:,} bytes and one block takes {layout.block_bytes:,}: "
            "raise --kv-cache-memory-bytes or free memory"
        )
    return count + 1


def device_blocks(
    config: EngineConfig,
    layout: CacheLayout,
    max_model_len: int,
    max_chunk: int,
    rows: int,
    peak_bytes: int,
    graph_bytes: int,
    memory: DeviceMemory | None = None,
) -> int:
    """Return the number of blocks to allocate, including the dummy block.

    peak_bytes: extra memory of the largest step; graph_bytes: future memory of captured graphs; memory: current usage,
    with weights loaded and no step's data; None: read from the current device.
    """
    if not layout.keeps:
        return _empty_blocks(rows)
    memory = memory or device_memory()
    share = utilization(config)
    size = layout.block_bytes
    longest = layout.blocks_for(max_model_len, max_chunk)
    taken = memory.used + peak_bytes + graph_bytes
    wished = config.num_gpu_blocks_override * size or config.kv_cache_memory_bytes
    if wished:
        _refuse_if_beyond(config, wished, size, memory.total - taken)
    budget = wished or int(share * memory.total) - taken - config.device_reserve_bytes
    most = max(MOST_BLOCKS, rows * (longest + layout.checkpoint_blocks))
    count = config.num_gpu_blocks_override or min(budget // size - 1, most)
    least = layout.blocks_for(min(LEAST_TOKENS, max_model_len), max_chunk)
    if count < least and not config.num_gpu_blocks_override:
        raise ConfigError(_too_small(config, wished, taken, (longest + 1) * size, memory))
    log.info(
        "device memory: %s in all, %s used now, %s for a step, %s for graphs; KV cache %s: %d blocks of %d tokens, "
        "%.1f contexts of %d tokens",
        gib(memory.total),
        gib(memory.used),
        gib(peak_bytes),
        gib(graph_bytes),
        gib((count + 1) * size),
        count,
        config.block_size,
        count / longest,
        max_model_len,
    )
    return count + 1


def _empty_blocks(rows: int) -> int:
    """Return the number of blocks without bytes: two per row, because the scheduler reserves some for rows."""
    return 2 * rows + 2


def check_weights(
    config: EngineConfig, weight_bytes: int, memory: DeviceMemory, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Refuse weights that cannot fit, before loading; dtype: the dtype in which they are counted."""
    share = utilization(config)
    needed = memory.used + weight_bytes + config.device_reserve_bytes
    if needed <= share * memory.total:
        return
    reason = (
        f"--gpu-memory-utilization {share:g} of {gib(memory.total)}: the weights take {gib(weight_bytes)}, "
        f"{gib(memory.used)} are used already and {gib(config.device_reserve_bytes)} are kept in reserve"
    )
    advice = _advice(needed, memory.total, "serve a smaller model, or free the device")
    half = weight_bytes // 2
    if dtype == torch.float32 and needed - half <= share * memory.total:
        advice += f"; --dtype bfloat16 takes {gib(half)} and fits"
    raise ConfigError(f"{reason}; {advice}")


def utilization(config: EngineConfig) -> float:
    """Return the checked share of the device's memory to use."""
    share = config.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ConfigError(f"--gpu-memory-utilization {share:g}: must be more than 0 and at most 1")
    return share


def fit_context(config: EngineConfig, layout: CacheLayout, wanted: int, max_chunk: int, num_blocks: int) -> int:
    """Return the context length: `wanted`, or what the blocks hold; refuse an explicit length that does not fit.

    num_blocks includes the dummy block.
    """
    _check_states(config, layout, min(LEAST_TOKENS, wanted), max_chunk, num_blocks - 1)
    if layout.blocks_for(wanted, max_chunk) < num_blocks:
        return wanted
    entries = range(-(-wanted // config.block_size))  # entries of a block table
    fits = bisect_left(entries, num_blocks, key=lambda n: layout.blocks_for(n * config.block_size, max_chunk)) - 1
    fits *= config.block_size
    if config.max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted}: the KV cache holds {fits} tokens; ask for at most {fits}, "
            "or raise --kv-cache-memory-bytes or --gpu-memory-utilization"
        )
    log.warning("context limited to %d of %d tokens by the KV cache's memory", fits, wanted)
    return fits


def _check_states(config: EngineConfig, layout: CacheLayout, tokens: int, max_chunk: int, num_blocks: int) -> None:
    """Refuse a cache too small for one row of `tokens` tokens, which needs two states and a tail."""
    least, runs = layout.blocks_for(tokens, max_chunk), layout.runs
    if runs is None or num_blocks >= least:
        return
    room = (
        f"the KV cache holds {max(num_blocks, 0)} blocks, and a row of {tokens} tokens takes {least}: two states of "
        f"{runs.state_blocks}, a tail of {runs.tail_blocks} and {least - runs.row_blocks} of tokens"
    )
    size = (least + 1) * layout.block_bytes
    if config.num_gpu_blocks_override:
        raise ConfigError(f"--num-gpu-blocks-override {config.num_gpu_blocks_override}: {room}; {least} fit")
    asked = config.kv_cache_memory_bytes
    said = f"--kv-cache-memory-bytes {asked}: " if asked else ""
    raise ConfigError(f"{said}{room}; --kv-cache-memory-bytes {size} fits")


def states_of(layout: CacheLayout, num_blocks: int, row_tokens: int, max_chunk: int) -> States | None:
    """Return the memory of states; None: the model has none. num_blocks: of the KV cache, without the dummy block."""
    runs = layout.runs
    if runs is None:
        return None
    state, tail = (count * layout.block_bytes for count in (runs.state_blocks, runs.tail_blocks))
    return States(state, tail, runs.padding, row_tokens, layout.rows_in(num_blocks, row_tokens, max_chunk))


def _refuse_if_beyond(config: EngineConfig, wished: int, size: int, left: int) -> None:
    """Refuse an explicit cache size beyond the device's memory."""
    if wished <= left:
        return
    largest = max(left // size - 1, 0)
    if config.num_gpu_blocks_override:
        said = f"--num-gpu-blocks-override {config.num_gpu_blocks_override}: at most {largest} fit"
    else:
        said = f"--kv-cache-memory-bytes {wished}: at most {max(left, 0)} fit"
    raise ConfigError(f"{said} beside the weights and a step ({gib(max(left, 0))} are left, {gib(size)} per block)")


def _too_small(config: EngineConfig, wished: int, taken: int, context: int, memory: DeviceMemory) -> str:
    if wished:
        return f"--kv-cache-memory-bytes {wished}: one context takes {context} bytes; ask for at least that"
    reason = (
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g} of {gib(memory.total)} leaves no room for a KV "
        f"cache: {gib(memory.used)} are used, a step and its graphs take {gib(taken - memory.used)}, "
        f"{gib(config.device_reserve_bytes)} are kept in reserve and one context takes {gib(context)}"
    )
    needed = taken + config.device_reserve_bytes + context
    return f"{reason}; {_advice(needed, memory.total, 'lower --max-model-len or --max-num-batched-tokens')}"


def _advice(needed: int, total: int, otherwise: str) -> str:
    smallest = math.ceil(100 * needed / total) / 100
    return f"the smallest value that fits is {smallest:g}" if smallest <= 1 else f"no value fits: {otherwise}"
