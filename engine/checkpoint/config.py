"""What config.json and generation_config.json say about every model: token ids, dtypes, sampling defaults.

In: parsed JSON objects. Out: checked values; older and newer spellings of a key give the same. Where several objects
may hold a key, the first object that names the key decides. Thread: any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.checkpoint.files import read_json
from engine.checkpoint.section import Section
from engine.quant.dialects import DIALECTS

READ = tuple(name for name in DIALECTS if " " not in name)  # methods that checkpoints name
UNKNOWN = "unknown"  # where settings name no method
SETTINGS = ("quantization_config", "compression_config")
# quant_method as some files spell it -> as DIALECTS does.
SPELLED = {
    "intel/auto-round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp8": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}
# Where models with towers may say how their decoder is quantised (InternVL's AWQ releases do), when the root does not.
DECODERS = (
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    ("thinker_config",),
    ("thinker_config", "text_config"),
)
log = logging.getLogger(__name__)

GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "do_sample")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(config: ModelConfig, requested: str, device: str) -> torch.dtype:
    """The dtype of activations and KV cache.

    On a CPU "auto" is float32, and weights saved as bfloat16 stay bfloat16 in memory: each is widened when read, which
    loses nothing. On an accelerator "auto" is bfloat16, and float16 for an encoder of texts that was saved as float16.
    Of decoders and of T5, whose norms are RMSNorms, the residual streams leave the range of float16, so none is
    computed in it.
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


def refuse_quantized(root: Section) -> None:
    """ConfigError where the weights are quantised in a way that no dialect of engine/quant reads."""
    given = root.values.get("quantization_config") is not None
    settings = root.section("quantization_config") if given else Section({}, root.path)
    method = settings.values.get("quant_method", UNKNOWN)
    if root.values.get("quantization") is not None and method == UNKNOWN:  # of newer files also quantization_config
        raise ConfigError(
            "config.json: the weights are quantized by MLX; this version does not read its format, so use the "
            "checkpoint that it was made from"
        )
    if given:
        if not isinstance(method, str) or method not in DIALECTS:
            raise ConfigError(
                f"config.json: the weights are quantized ({method}); this version reads {', '.join(READ)} and "
                "unquantized checkpoints: use one of those"
            )
        DIALECTS[method](settings)


def with_quantisation(root: Section, folder: Path) -> Section:
    """The configuration with `quantization_config`, wherever the checkpoint says how its weights are quantised.

    What the decoder's object says comes last: it may be that of the checkpoint which was quantised again (NVIDIA's
    Kimi-K2.5 in NVFP4 holds the settings of the release in INT4 there, and its own beside config.json).
    """
    places = [_below(root.values, path) for path in ((), *DECODERS)]
    own, *inside = [next((found for key in SETTINGS if (found := place.get(key))), None) for place in places]
    settings = own or next((found for file, read in BESIDE.items() if (found := read(folder / file))), None)
    settings = settings or next(filter(None, inside), None)
    if settings is None:
        return Section({key: value for key, value in root.values.items() if key != SETTINGS[0]}, root.path)
    if isinstance(settings, dict):
        if isinstance(inner := settings.get("quantization"), dict):  # as in hf_quant_config.json
            settings = {**settings, **inner}
        known = {"quant_algo": "modelopt"} | dict.fromkeys(("config_groups", "sparsity_config"), "compressed-tensors")
        named = next((method for key, method in known.items() if key in settings), UNKNOWN)
        method = settings.get("quant_method") or settings.get("method") or named  # GPTQModel writes both
        settings = {**settings, "quant_method": SPELLED.get(method, method) if isinstance(method, str) else method}
    return Section({**root.values, "quantization_config": settings}, root.path)


def _below(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The object at this path, or none."""
    for key in path:
        values = values.get(key) or {}
        if not isinstance(values, dict):
            return {}
    return values


def _modelopt(path: Path) -> dict[str, Any] | None:
    found = read_json(path, required=False).get("quantization")
    if not isinstance(found, dict) or not (found.get("quant_algo") or found.get("kv_cache_quant_algo")):
        return None
    return {**found, "quant_method": "modelopt"}


def _gptq(path: Path) -> dict[str, Any] | None:
    found = read_json(path, required=False)
    return {"quant_method": "gptq", **found} if "bits" in found else None


def _awq(path: Path) -> dict[str, Any] | None:
    found = read_json(path, required=False)
    if "w_bit" not in found:
        return None
    named = {"bits": found["w_bit"], "group_size": found.get("q_group_size", 128), "version": found.get("version")}
    return {"quant_method": "awq", **named}


# Files beside config.json that older releases of the quantisers write.
BESIDE = {"hf_quant_config.json": _modelopt, "quantize_config.json": _gptq, "quant_config.json": _awq}


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
    """Those of the ending tokens that the vocabulary has; the others can never be drawn, which is logged."""
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
