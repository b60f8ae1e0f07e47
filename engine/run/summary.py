"""The log lines about the settings of a start and their reasons: model, steps, KV cache, graphs.

Owner: device thread, once, after loading. In: the operator's settings and the resulting sizes. Out: four lines of text;
each value is followed by the flag or the rule that set it.
"""

from __future__ import annotations

from collections.abc import Iterator

from _fast import cpu
from engine.base.config import EngineConfig
from engine.cache.layout import CacheLayout
from engine.device.memory import gib
from engine.kernels.target import target
from engine.models.base.model import Model
from engine.parallel.codes import rank_bytes
from engine.parallel.model import SplitModel
from engine.quant.kv import FLAG, numbers_line
from engine.step.sizes import Sizes, decode_sizes
from engine.weights.load import weight_bytes


def summary(config: EngineConfig, model: Model, sizes: Sizes, layout: CacheLayout, num_blocks: int) -> Iterator[str]:
    """Yields the four lines; `num_blocks`: blocks of the KV cache without the dummy block."""
    on_cpu = str(model.device) == "cpu"
    yield of_model(config, model, on_cpu)
    rule = "the default on a CPU" if on_cpu else "the default on accelerators"
    rows = why("--max-num-seqs", config.max_num_seqs, rule)
    tokens = why("--max-num-batched-tokens", config.max_num_batched_tokens, rule)
    yield f"steps: up to {sizes.max_rows} rows ({rows}) and {sizes.max_tokens:,} tokens ({tokens})"
    yield of_cache(config, model, sizes, layout, num_blocks)
    yield of_graphs(config, sizes, on_cpu)


def why(flag: str, value: object, otherwise: str) -> str:
    """The reason for a value: the flag if the operator set it, else `otherwise`."""
    return flag if value else otherwise


def of_model(config: EngineConfig, model: Model, on_cpu: bool) -> str:
    """The line about architecture, dtype and device."""
    saved, dtype = (str(one).removeprefix("torch.") for one in (model.config.torch_dtype, model.dtype))
    rule = "what a CPU computes in" if on_cpu else "what accelerators compute in"
    asked = "" if config.dtype == "auto" else "--dtype"
    chosen = why(asked, asked, "as saved" if saved == dtype else f"{rule}; saved as {saved}")
    if on_cpu:
        threads = why("--num-threads", config.num_threads, "all cores")
        place = f"on the CPU ({cpu.isa()}) with {cpu.num_threads()} threads ({threads})"
    else:
        size = weight_bytes(model) if not isinstance(model, SplitModel) else rank_bytes(model.members[0], 0)
        place = f"on {model.device} ({target().arch}), weights of {gib(size)}"
    return f"model: {model.config.architecture} in {dtype} ({chosen}) {place}"


def of_cache(config: EngineConfig, model: Model, sizes: Sizes, layout: CacheLayout, num_blocks: int) -> str:
    """The line about the KV cache: its blocks, its bytes, and how many of the longest contexts fit."""
    if config.num_gpu_blocks_override:
        chosen = "--num-gpu-blocks-override"
    else:
        chosen = why("--kv-cache-memory-bytes", config.kv_cache_memory_bytes, "from free memory and what rows can need")
    longest = sizes.max_model_len
    limit = "the KV cache's memory" if longest < (config.max_model_len or model.config.max_position) else ""
    context = limit or why("--max-model-len", config.max_model_len, "the checkpoint's")
    contexts = num_blocks / layout.blocks_for(longest, sizes.max_chunk)
    prefixes = "on" if config.enable_prefix_caching else "off"
    numbers = numbers_line(layout.specs, model.dtype)
    if numbers:
        word = "" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        prefixes += f"; {numbers} ({why(FLAG, word, 'the checkpoint was made for it')})"
    return (
        f"KV cache: {num_blocks:,} blocks of {config.block_size} tokens, {gib(num_blocks * layout.block_bytes)} "
        f"({chosen}), {contexts:.1f} contexts of {longest:,} tokens ({context}); prefix caching {prefixes}"
    )


def of_graphs(config: EngineConfig, sizes: Sizes, on_cpu: bool) -> str:
    """The line about the sizes of steps that have graphs."""
    if on_cpu:
        return "graphs: none; a CPU's steps are calls of C kernels"
    if config.enforce_eager:
        return "graphs: none (--enforce-eager); steps are launched kernel by kernel"
    decode = decode_sizes(sizes.max_rows, config.cudagraph_capture_sizes)
    mixed = sizes.mixed
    chosen = why("--cudagraph-capture-sizes", config.cudagraph_capture_sizes, "1, 2, 4 and eights")
    prompts = f"{len(mixed)} with prompts to {mixed[-1]:,} tokens"
    return f"graphs: {len(decode)} of decode steps to {decode[-1]} rows ({chosen}), {prompts}"
