"""Load engine, text and media in parallel, in the time of the slowest; folders.py runs before this.

Owner: loop; the work runs on the device thread and in the pool. In: AppState in phase starting. Out: AppState,
complete.

    device thread | torch, config, weights, warm-up ................ | ready
    pool          | tokenizer | grammars' vocabulary |      template, media |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from server.http.websocket import import_sockets
from server.jobs.sampling import check_defaults, defaults_from, within_bounds
from server.ops.expert_watch import ExpertWatch
from server.ops.metrics import exposition
from server.ops.planted import into_decoders
from server.render.frames import Frames
from server.render.vocabulary import Vocabulary
from server.start.adapters import load_adapters
from server.start.makers import (
    make_grammars,
    make_loader,
    make_parsers,
    make_renderer,
    no_tokenizer,
    tokenizer_of,
    whisper_tokens,
)
from server.start.phases import in_pool
from server.state import AppState

MORE_IDS = 128  # ids that a tokenizer may have beyond the model's logits, for structured output
log = logging.getLogger("omniloop")


async def load(state: AppState) -> None:
    """Load everything. Raises ConfigError if the model cannot be served."""
    begun = time.perf_counter()
    text = asyncio.ensure_future(load_text(state))
    try:
        await state.engine.start()
        state.startup["engine"] = time.perf_counter() - begun
        await text
    finally:
        text.cancel()
    if state.config.model.skip_tokenizer_init:
        state.tokenizer = no_tokenizer(state)
    if state.engine.limits.pools and not state.config.model.skip_tokenizer_init:
        state.frames = await in_pool(state, "frames", lambda: Frames.of(state.tokenizer))
    state.media = await in_pool(state, "media", lambda: make_loader(state))
    state.renderer = await in_pool(state, "template", lambda: make_renderer(state))
    state.parsers = await in_pool(state, "parsers", lambda: make_parsers(state))
    state.whisper = await in_pool(state, "speech", lambda: whisper_tokens(state))
    complete(state)
    await load_adapters(state)
    await in_pool(state, "metrics", lambda: exposition(state.metrics))  # else the first scrape imports on the loop


async def load_text(state: AppState) -> None:
    """Load the tokenizer and its vocabulary for grammars; nothing with --skip-tokenizer-init."""
    model = state.config.model
    if model.skip_tokenizer_init:
        return
    state.tokenizer = await in_pool(state, "tokenizer", lambda: tokenizer_of(state))
    if model.structured_outputs_backend != "none":
        state.grammars = await in_pool(state, "grammars", lambda: make_grammars(state))


def complete(state: AppState) -> None:
    """Set what depends on both model and engine."""
    config, engine = state.config, state.engine
    generation = engine.model.generation if config.model.generation_config == "auto" else {}
    generation = within_bounds(generation, engine.model.text.vocab_size)
    state.defaults = defaults_from(generation, config.model.override_generation_config)
    log_defaults(state.defaults)
    log_vocabularies(state.tokenizer.vocab_size, engine.model.text.vocab_size)
    tokenizer, width = state.tokenizer, engine.model.text.vocab_size
    ends = (*engine.model.eos_token_ids, *(token for token in tokenizer.end_tokens() if token < width))
    named = tuple(dict.fromkeys(ends))
    state.vocabulary = Vocabulary(width, named, tokenizer.encode, tokenizer.require_texts, tokenizer.table)
    if tokenizer.vocab_size > engine.model.text.vocab_size + MORE_IDS:
        log.warning("structured output is off: the tokenizer has many more ids than the model has logits")
        state.grammars = None
    if not engine.limits.pools:
        check_defaults(state.defaults, config, state.vocabulary)
    for places in (state.places, state.batches.places):
        places.size(engine.limits.max_open, engine.limits.max_rows, config.pool_threads)
    metrics = state.metrics
    metrics.model_name = state.names[0]
    metrics.resize(engine.max_model_len)
    metrics.engine = lambda: engine.stats
    metrics.cache_info = {
        "block_size": str(engine.block_size),
        "num_gpu_blocks": str(engine.num_blocks),
        "cache_dtype": config.cache.kv_cache_dtype,
        "num_gpu_blocks_override": str(config.cache.num_gpu_blocks_override or None),
        "kv_cache_memory_bytes": str(config.cache.kv_cache_memory_bytes or None),
        "max_model_len": str(engine.max_model_len),
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "gpu_memory_utilization": str(config.cache.gpu_memory_utilization),
    }
    engine.on_step = metrics.step
    if engine.model.text.routings:
        experts = state.experts = ExpertWatch(engine)
        metrics.experts = lambda: experts.layers
    if state.media is not None:
        if engine.config.faults is not None:
            into_decoders(state.media, engine.config.faults)
        if "audio" in engine.model.modalities:
            state.pool.submit(import_sockets)  # before a request needs them
        cache = state.media.cache
        metrics.mm_cache = lambda: (cache.queries, cache.hits)
        if config.media.media_isolation != "none":
            metrics.helpers = state.media.helpers.counts


def log_defaults(defaults: Mapping[str, Any]) -> None:
    """Log the checkpoint's default sampling settings, which change the answers of clients that set none."""
    if defaults:
        defaults_text = ", ".join(f"{name}={value}" for name, value in defaults.items())
        log.info(
            "sampling defaults of the checkpoint and --override-generation-config: %s; "
            "--generation-config vllm ignores the checkpoint's",
            defaults_text,
        )


def log_vocabularies(tokens: int, rows: int) -> None:
    """Warn if the tokenizer has ids that the model lacks; each prompt that contains one is refused."""
    if tokens > rows:
        log.warning(
            "the tokenizer has ids up to %d and the model has %d tokens: prompts with other ids are "
            "refused; --tokenizer selects another tokenizer",
            tokens - 1,
            rows,
        )
