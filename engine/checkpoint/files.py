"""The configuration files of a checkpoint: config.json, or Mistral's params.json rewritten in its words.

In: a folder. Out: one Section, as a transformers checkpoint would have it, so that readers of configurations know one
spelling only. A consolidated checkpoint has params.json, consolidated*.safetensors (engine/weights/consolidated.py) and
a tokenizer of Mistral's own; its special ids 1 and 2 are the same in every release. Thread: any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.section import Section
from engine.errors import ConfigError

CONFIG = "config.json"
PARAMS = "params.json"
POINTER = b"version https://git-lfs"  # how a pointer of Git LFS begins
MAX_POSITION = 128_000  # what params.json that name no length are made for
OLDER = {"max_sequence_length": "max_position_embeddings", "llm_config": "text_config"}
# What these models have and this version does not compute.
UNSUPPORTED = {
    "moe": "mixture of experts",
    "vision_encoder": "a picture tower",
    "multimodal": "towers for other modalities",
    "q_lora_rank": "latent attention",
    "lora": "adapters inside",
}
TOWERS = ("vision_encoder", "multimodal")


def read_root(folder: Path, overrides: Mapping[str, Any] | None = None, text_only: bool = False) -> Section:
    """The configuration of a folder, with the operator's values over it; `text_only`: without towers."""
    if not (folder / CONFIG).is_file() and (folder / PARAMS).is_file():
        values, name = _as_config(Section(read_json(folder / PARAMS), PARAMS), text_only), PARAMS
    else:
        values, name = read_json(folder / CONFIG), CONFIG
    return Section(_merged(_renewed(values), overrides or {}), name)


def _renewed(values: dict[str, Any]) -> dict[str, Any]:
    """Keys of the first files under the names that they have since."""
    return {OLDER.get(key, key) if OLDER.get(key) not in values else key: value for key, value in values.items()}


def _merged(values: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Objects are merged key by key, other values replaced, and null takes a key away."""
    merged = dict(values)
    for key, value in over.items():
        below = values.get(key)
        merged[key] = _merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
        if value is None:
            del merged[key]
    return merged


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """A file that holds a JSON object."""
    try:
        data = path.read_bytes()
        refuse_pointer(path, data)
        value = json.loads(data)
    except FileNotFoundError:
        if not required:
            return {}
        needed = "a folder in Hugging Face or Mistral format is needed"
        raise ConfigError(f"{path} is missing; {needed}{_found_instead(path.parent)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def refuse_pointer(path: Path, data: bytes) -> None:
    """Raises ConfigError for what git leaves in the place of a large file that was not fetched."""
    if data.startswith(POINTER):
        raise ConfigError(f"{path} is a pointer of Git LFS and not the file itself: run git lfs pull in its folder")


def _found_instead(folder: Path) -> str:
    """What a folder without a configuration holds, where that is a known mistake."""
    if (folder / "adapter_config.json").is_file():
        return "; it holds an adapter: merge that into its base model (peft: merge_and_unload) and serve the result"
    for path in sorted(folder.glob("*.gguf")):
        return f"; name the GGUF file itself: --model {path}"
    for below in ("*", "snapshots/*"):  # as git clones and the hub's cache have it
        for path in sorted(folder.glob(f"{below}/{CONFIG}")):
            return f"; there is one in {path.parent}"
    return ""


def head_dim(folder: Path) -> int:
    """Values per attention head of a consolidated checkpoint."""
    params = Section(read_json(folder / PARAMS), PARAMS)
    return params.size("head_dim", params.size("dim") // params.size("n_heads"))


def _as_config(params: Section, text_only: bool) -> dict[str, Any]:
    for key, what in UNSUPPORTED.items():
        if params.values.get(key) is not None and not (text_only and key in TOWERS):
            instead = "; --language-model-only serves the decoder" if key in TOWERS else ""
            raise ConfigError(
                f"{PARAMS}: {key} asks for {what}, which this version does not serve in this format{instead}"
            )
    heads = params.size("n_heads")
    limit = params.size("max_position_embeddings", params.size("max_seq_len", MAX_POSITION))
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": params.size("dim"),
        "intermediate_size": params.size("hidden_dim"),
        "num_hidden_layers": params.size("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": params.size("n_kv_heads", heads),
        "head_dim": params.size("head_dim", params.size("dim") // heads),
        "vocab_size": params.size("vocab_size"),
        "rms_norm_eps": params.number("norm_eps"),
        "rope_theta": params.number("rope_theta", 10_000.0),
        "max_position_embeddings": limit,
        "sliding_window": _window(params),
        "tie_word_embeddings": params.boolean("tied_embeddings", False),
        "eos_token_id": 2,
        "dtype": params.values.get("dtype") or "bfloat16",
    }
    if params.values.get("quantization") is not None:
        config["quantization_config"] = _quantisation(params.section("quantization"))
    if params.values.get("yarn") is not None:
        config["rope_scaling"] = _yarn(params.section("yarn"), limit)
    if params.values.get("llama_4_scaling") is not None:
        config |= _ministral3(params.section("llama_4_scaling"), config)
    return config


def _quantisation(found: Section) -> dict[str, Any]:
    """FP8 with a scale per matrix, and one for what is multiplied by the matrix where the scheme is TENSOR."""
    form = found.values.get("qformat_weight")
    if form != "fp8_e4m3":
        raise ConfigError(
            f"{found.path}: qformat_weight={form!r}; fp8_e4m3 is read: use the checkpoint in another format"
        )
    static = found.values.get("qscheme_act") == "TENSOR"
    return {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}


def _ministral3(scaling: Section, config: dict[str, Any]) -> dict[str, Any]:
    """Queries grow with log(1 + position // original), beyond the context that YaRN stretches."""
    yarn = config.get("rope_scaling", {})
    original = scaling.size("original_max_position_embeddings")
    if yarn.get("original_max_position_embeddings") != original:
        raise ConfigError(
            f"{scaling.path}: original_max_position_embeddings={original} must be that of yarn, "
            f"{yarn.get('original_max_position_embeddings')}"
        )
    rope = {**yarn, "rope_theta": config["rope_theta"], "llama_4_scaling_beta": scaling.number("beta")}
    return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": rope}


def _window(params: Section) -> int | None:
    """One window for all layers; the list form (some layers without) is another architecture."""
    value = params.values.get("sliding_window", params.values.get("_sliding_window"))
    if isinstance(value, list):
        raise ConfigError(f"{PARAMS}: sliding_window={value} differs between layers, which this architecture has not")
    return None if value is None else params.size("sliding_window", value)


def _yarn(yarn: Section, limit: int) -> dict[str, Any]:
    """`beta` and `alpha` are the fast and the slow bound; without `apply_scale` attention is not scaled."""
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": yarn.number("factor"),
        "original_max_position_embeddings": yarn.size("original_max_position_embeddings", limit),
        "beta_fast": yarn.number("beta", 32.0),
        "beta_slow": yarn.number("alpha", 1.0),
    }
    if not yarn.boolean("apply_scale", True):
        scaling["attention_factor"] = 1.0
    return scaling
