"""Estimate: the memory that a model will need on a device, from its configuration and its files' headers alone.

Thread: any; nothing is allocated. In: an EngineConfig whose `model` is a folder, and the headers. Out: bytes and
tokens. The arithmetic is the same as at start (cache/sizing.py). The start measures the largest step and its graphs;
the estimate computes them from the sizes of the layers. It raises the same ConfigErrors as the start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.cache.sizing import SHORT_ROW, States, check_weights, device_blocks, fit_context, host_blocks, states_of
from engine.checkpoint.config import resolve_dtype
from engine.device.host import choose_device
from engine.device.memory import DeviceMemory
from engine.kernels.target import target
from engine.models.base.model import Model, check_prompt_rows
from engine.models.registry import build_model, load_model_config
from engine.quant.forms import form_line
from engine.quant.kv import numbers_line
from engine.quant.online import requested
from engine.run.bounds import sizes_of
from engine.run.planned import Planned, planned
from engine.run.shares import Shares, shares_of
from engine.step.sizes import Sizes
from engine.weights.files import Shard
from engine.weights.load import match


class TensorCounts(NamedTuple):
    """Numbers of tensors in a model's files."""

    read: int
    mtp: int  # of multi-token-prediction layers, which the start does not read


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory and capacity of one model on one device."""

    config: ModelConfig
    device: str  # the device as torch names it
    dtype: torch.dtype  # dtype of activations
    lines: tuple[str, ...]  # a line about the quantised layers, if there are any, and about parts of steps
    tensors: TensorCounts  # in the files
    of_ranks: tuple[int, ...]  # bytes of weights by rank, of several with a drafter's; most engines have one rank
    numbers: str  # the number format of keys and values, if it is not the activations' dtype
    kv_bytes: int  # KV cache bytes of a thousand tokens, if no sliding window drops tokens
    context: int  # tokens of the longest request
    context_bytes: int  # KV cache bytes of the longest request
    num_blocks: int  # blocks of the KV cache, without the dummy block
    contexts: float  # how many of the longest requests fit at the same time
    memory: DeviceMemory | None  # an accelerator's memory before loading; None on a CPU
    states: States | None = None  # recurrent states; None: the model has none
    refusal: ConfigError | None = None  # set if the device's memory is too small; `context` is 0 then

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on the device that has most; on a CPU of all ranks."""
        return sum(self.of_ranks) if self.memory is None else max(self.of_ranks)


def estimate(config: EngineConfig, shards: list[Shard] | None) -> Estimate:
    """The estimate of a model. Raises ConfigError if the start would raise it; `shards`: None with random weights."""
    found = described(config, shards)
    if found.refusal is not None:
        raise found.refusal
    return found


def described(config: EngineConfig, shards: list[Shard] | None) -> Estimate:
    """Like `estimate`, but an error about too little device memory is returned in `refusal`; others are raised."""
    device = choose_device(config.device)
    model_config = load_model_config(
        config.model, config.hf_overrides, config.without_media, config.model_impl, config.runner, config.pooler
    )
    model_config = requested(model_config, config.quantization)
    dtype = resolve_dtype(model_config, config.dtype, device)
    sizes = sizes_of(config, model_config, device)
    model_config = replace(model_config, max_model_len=sizes.max_model_len)
    model = build_model(model_config, dtype, "cpu", shards)
    check_prompt_rows(config.enable_prompt_embeds, model)
    names = {} if shards is None else match(model, shards, config.model)
    held = shares_of(config, model, sizes, device, shards, names)
    memory = held.memories[0] if held.memories else None
    plan = planned(config, held.model, sizes, shards, on_host=device == "cpu", read=False)
    layout = plan.layout
    longest = layout.blocks_for(sizes.max_model_len, sizes.max_chunk)
    blocks, context, refusal = 1, 0, None
    try:
        if memory is None:
            blocks = host_blocks(config, layout, longest, sizes.max_rows, sum(held.weights))
        else:
            peak = step_bytes(held.config, sizes, dtype)
            blocks = min(_device_blocks(config, plan, rank, held, peak) for rank in range(len(held.memories)))
        context = fit_context(config, layout, sizes.max_model_len, sizes.max_chunk, blocks)
    except ConfigError as error:
        refusal = error
    each = layout.blocks_for(context, sizes.max_chunk)
    claimed = plan.claim.weight_bytes if len(held.weights) > 1 else 0
    predicts = config.speculative.get("method") == "mtp"
    return Estimate(
        config=model_config,
        device=device,
        dtype=dtype,
        lines=tuple(line for line in (form_line(model, None if device == "cpu" else target()), *plan.lines) if line),
        tensors=TensorCounts(len(names), 0 if predicts else num_mtp(model, shards or [])),
        of_ranks=(held.weights[0] + claimed, *held.weights[1:]),
        numbers=numbers_line(layout.specs, dtype),
        kv_bytes=layout.token_groups * layout.block_bytes * 1000 // sizes.block_size,
        states=states_of(layout, blocks - 1, min(SHORT_ROW, sizes.max_model_len), sizes.max_chunk),
        context=context,
        context_bytes=each * layout.block_bytes,
        num_blocks=blocks - 1,
        contexts=(blocks - 1) / each if context else 0.0,
        memory=memory,
        refusal=refusal,
    )


def num_mtp(model: Model, shards: list[Shard]) -> int:
    """The number of tensors in the files that belong to multi-token-prediction layers, under any family's name."""
    table, text = model.weight_table(), model.config.text
    first = len(text.layers)
    layers = tuple(f"layers.{number}." for number in range(first, first + text.num_nextn_predict_layers))
    names = [table.canonical(name) for shard in shards for name in shard.tensors]
    return sum(table.ignored(name) and (name.startswith(layers) or "mtp" in re.split("[._]", name)) for name in names)


def _device_blocks(config: EngineConfig, plan: Planned, rank: int, held: Shares, peak: int) -> int:
    """The blocks that fit on a rank's device."""
    from engine.step.backend.device.startup import GRAPH_BYTES

    model, sizes, memory = plan.model, plan.sizes, held.memories[rank]
    weights = held.weights[rank] + (0 if rank else plan.claim.weight_bytes)
    check_weights(config, weights, memory, model.dtype)
    loaded = replace(memory, free=memory.free - weights)
    layout = plan.layout.of_rank(rank, len(held.memories))
    return device_blocks(
        config, layout, sizes.max_model_len, sizes.max_chunk, sizes.max_rows, peak, peak + GRAPH_BYTES, loaded
    )


def step_bytes(config: ModelConfig, sizes: Sizes, dtype: torch.dtype) -> int:
    """About the bytes of the largest step: residual stream and one layer's products per token; logits, and logits after
    rules, per place for which a token is chosen, drafted places included; the counts of rules per row."""
    text = config.text
    heads = (text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    wide = 3 * max((layer.intermediate_size for layer in text.layers), default=0) or 3 * text.intermediate_size
    per_layer = 3 * len(text.layers) * text.hidden_size_per_layer_input
    per_token = (4 * text.hidden_size + wide + 2 * heads + per_layer) * dtype.itemsize
    return sizes.max_tokens * per_token + 4 * (2 * sizes.max_lines + sizes.max_rows) * text.vocab_size
