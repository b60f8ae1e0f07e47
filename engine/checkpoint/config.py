"""Reads token ids, dtypes and sampling defaults from config.json and generation_config.json, for every model.

In: parsed JSON objects. Out: checked values; older and newer spellings of a key give the same. Where several objects
may hold a key, the first object that names the key decides. Thread: any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.checkpoint.section import Section

log = logging.getLogger(__name__)

GENERATION_KEYS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "do_sample", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "top_n_sigma", "xtc_probability",
    "xtc_threshold",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(config: ModelConfig, requested: str, device: str) -> torch.dtype:
    """The dtype of activations and KV cache.

    On a CPU "auto" is float32, and weights saved as bfloat16 stay bfloat16 in memory: kernels widen each weight when
    they read it, without loss. On an accelerator "auto" is bfloat16, or float16 for a text encoder that was saved as
    float16. Decoders and T5 have RMSNorms, and their residual streams leave the range of float16, so they never run in
    float16.
    """
    if requested not in ("auto", *DTYPES):
        raise ConfigError(f"--dtype {requested}: allowed are auto, {', '.join(DTYPES)}")
    takes_float16 = device != "cpu" and config.is_encoder and config.text.layer_norm
    takes_float16 = takes_float16 and not config.raw.get("quantization_config")
    if requested == "float16" and not takes_float16:
        raise ConfigError(
            "--dtype float16: only unquantised encoders of texts are computed in it, on an accelerator; use auto, "
            "float32 or bfloat16, which take float16 checkpoints too"
        )
    if requested != "auto":
        return DTYPES[requested]
    if device == "cpu":
        return torch.float32
    if config.torch_dtype == torch.float16:
        if takes_float16:
            return torch.float16
        log.warning("the checkpoint is float16 and is computed in bfloat16; --dtype float32 keeps all its digits")
    return torch.bfloat16


def saved_dtype(*sources: dict[str, Any]) -> torch.dtype:
    """The dtype of the weights in the files."""
    for source in sources:
        name = source.get("dtype") or source.get("torch_dtype")
        if name is not None:
            name = str(name).removeprefix("torch.")
            if name not in DTYPES:
                raise ConfigError(f"config.json: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
            return DTYPES[name]
    return torch.float32


def generation_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """The sampling defaults that the server knows."""
    return {key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None}


def eos_token_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer; a file names a token or a list of tokens."""
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(item) is int and item >= 0 for item in ids):
                raise ConfigError(f"eos_token_id={value!r} must be a token id or a list of them")
            return tuple(ids)
    return ()


def drawable(ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The ending tokens that the vocabulary has; others can never be sampled, and are logged."""
    beyond = [token for token in ids if token >= vocab_size]
    if beyond:
        log.warning("eos_token_id %s: the vocabulary has %d tokens, so this never ends an answer", beyond, vocab_size)
    return tuple(token for token in ids if token < vocab_size)


def media_token_ids(section: Section) -> dict[str, int]:
    """Placeholder ids by modality, and the ids of the tokens around placeholders."""
    return dict(_media_tokens(section))


def _media_tokens(section: Section) -> Iterator[tuple[str, int]]:
    for name in ("image", "video", "audio"):
        for key in (f"{name}_token_id", f"{name}_token_index"):  # newer and older files
            if section.values.get(key) is not None:
                yield name, section.integer(key)
    for name in ("vision_start", "vision_end", "audio_start", "audio_end"):
        key = f"{name}_token_id"
        if section.values.get(key) is not None:
            yield name, section.integer(key)
