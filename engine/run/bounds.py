"""Sizes of steps: from the operator's flags, else from the defaults of the device.

Thread: any; nothing is allocated. In: the operator's settings and the checkpoint's configuration. Out: Sizes, or a
ConfigError that names the flag.
"""

from __future__ import annotations

from engine.base.config import EngineConfig
from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.limits import idle_slots
from engine.base.model_config import ModelConfig
from engine.models.drafters.settings import drafts_of
from engine.step.sizes import Sizes

CPU_ROWS, CPU_TOKENS = 64, 512  # defaults of max_num_seqs and max_num_batched_tokens on a CPU
DEVICE_ROWS, DEVICE_TOKENS = 256, 2048  # the same defaults on an accelerator
POOLING_ROWS, POOLING_TOKENS = 1024, 16384  # pooling models on an accelerator: many short texts fill one step
CPU_POOLING_ROWS, CPU_POOLING_TOKENS = 256, 4096  # pooling models on a CPU


def check_prefix(config: EngineConfig, encoder_prefix: int, host: bool) -> None:
    """Raises ConfigError for settings that do not work with a model whose prompts begin with audio."""
    if encoder_prefix % config.block_size:
        raise ConfigError(
            f"--block-size {config.block_size}: this model's {encoder_prefix} rows of sound need 16 or 32"
        )
    if 0 < config.max_model_len <= encoder_prefix:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the sound of a prompt takes {encoder_prefix} tokens; "
            "ask for more, or leave it out"
        )
    if config.deterministic and not host:
        raise ConfigError("--deterministic: not for this model, whose attention is cut as the whole step suggests")


def sizes_of(config: EngineConfig, model_config: ModelConfig, device: str) -> Sizes:
    """Sizes of steps from the operator's flags, else from the defaults of the device. Raises ConfigError."""
    host, pooling = device == "cpu", model_config.pooling
    usual = (CPU_ROWS, CPU_TOKENS) if host else (DEVICE_ROWS, DEVICE_TOKENS)
    if pooling is not None:
        usual = (CPU_POOLING_ROWS, CPU_POOLING_TOKENS) if host else (POOLING_ROWS, POOLING_TOKENS)
    rows, tokens = config.max_num_seqs or usual[0], config.max_num_batched_tokens or usual[1]
    held = model_config.max_position
    if config.max_model_len > held:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: this checkpoint holds {held}; ask for at most {held}"
        )
    if model_config.encoder_prefix:
        check_prefix(config, model_config.encoder_prefix, host)
    asked = config.max_model_len or held
    if pooling is not None:
        asked = config.max_model_len or min(held, pooling.max_tokens or held)
    if asked < 2:
        raise ConfigError(f"--max-model-len {asked}: a prompt and its answer need at least 2 tokens")
    whole = pooling is not None and pooling.whole
    together = model_config.bidirectional == "prompt"  # a step fits a whole prompt and one token of each other row
    tokens = max(tokens, rows, asked if whole else 0, asked + rows - 1 if together else 0)
    beyond = [size for size in config.cudagraph_capture_sizes if not 1 <= size <= rows]
    if beyond:
        raise ConfigError(
            f"--cudagraph-capture-sizes {beyond[0]}: a step has 1 to {rows} rows here; leave it out, or raise "
            "--max-num-seqs"
        )
    return Sizes(
        max_rows=rows,
        max_tokens=tokens,
        max_slots=rows + config.max_num_queued_reqs + idle_slots(rows),
        max_model_len=asked,
        max_chunk=tokens if whole or together else min(config.max_prefill_chunk or tokens, tokens),
        block_size=asked if pooling is not None and pooling.bidirectional else config.block_size,
        whole_prompts=whole,
        ranks=config.tensor_parallel,
        width=width_of(config, model_config),
        encoder_rows=config.encoder_cache_tokens or max(4 * tokens, 16384),
    )


def width_of(config: EngineConfig, model_config: ModelConfig) -> int:
    """Places for the tokens that a row gets from one step. Raises ConfigError."""
    if not config.speculative:
        if config.report_drafts:
            raise ConfigError(
                f"--per-request-spec-decode-metrics: this server makes no drafts; add {FLAG}, or leave the flag out"
            )
        return 1
    if model_config.pooling is not None:
        raise ConfigError(f"{FLAG}: this model computes vectors or scores, not tokens; leave the flag out")
    found = drafts_of(config, model_config)
    return 1 if found is None else found[0].num_tokens + 2
