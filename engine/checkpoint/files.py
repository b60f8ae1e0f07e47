"""The configuration files of a checkpoint: config.json, or Mistral's params.json (params.py).

In: a folder. Out: one Section with the keys of transformers' config.json, so that the other readers handle only one
spelling. Thread: any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.checkpoint.params import as_config
from engine.checkpoint.section import Section

CONFIG = "config.json"
PARAMS = "params.json"
POINTER = b"version https://git-lfs"  # how a pointer of Git LFS begins
INSIDE = "vlm_config"
OF_THE_WHOLE = ("architectures", "model_type", "dtype", "torch_dtype")  # the outer file's values win over the inner's
OLDER = {"max_sequence_length": "max_position_embeddings", "llm_config": "text_config"}


def read_root(folder: Path, overrides: Mapping[str, Any] | None = None, text_only: bool = False) -> Section:
    """The configuration of a folder, with the operator's overrides; `text_only`: without towers."""
    if not (folder / CONFIG).is_file() and (folder / PARAMS).is_file():
        values, name = as_config(Section(read_json(folder / PARAMS), PARAMS), text_only), PARAMS
    else:
        values, name = read_json(folder / CONFIG), CONFIG
    return Section(_merged(_renewed(_flat(values)), overrides or {}), name)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """A retriever's config.json flattened: `vlm_config`, the base model's full config, merges into the outer object."""
    inner = values.get(INSIDE)
    own = {key: values[key] for key in OF_THE_WHOLE if key in values}
    return {**values, **inner, **own} if isinstance(inner, dict) else values


def _renewed(values: dict[str, Any]) -> dict[str, Any]:
    """Renames the keys of early files to their current names."""
    return {OLDER.get(key, key) if OLDER.get(key) not in values else key: value for key, value in values.items()}


def _merged(values: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` overridden by `over`: objects merge key by key, other values are replaced, and null removes a key."""
    merged = dict(values)
    for key, value in over.items():
        below = values.get(key)
        merged[key] = _merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
        if value is None:
            del merged[key]
    return merged


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """Reads a file that holds a JSON object."""
    try:
        data = path.read_bytes()
        refuse_pointer(path, data)
        value = json.loads(data)
    except FileNotFoundError:
        if not required:
            return {}
        needed = "a folder in Hugging Face or Mistral format is needed"
        raise ConfigError(f"{path} is missing; {needed}{_found_instead(path.parent)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def refuse_pointer(path: Path, data: bytes) -> None:
    """Raises ConfigError for the pointer file that git leaves in place of a large file that was not fetched."""
    if data.startswith(POINTER):
        raise ConfigError(f"{path} is a pointer of Git LFS and not the file itself: run git lfs pull in its folder")


def _found_instead(folder: Path) -> str:
    """The hint for a folder without a configuration whose content shows a known mistake; else ""."""
    if (folder / "adapter_config.json").is_file():
        return "; it holds an adapter: serve its base model with --enable-lora --lora-modules NAME=FOLDER"
    for path in sorted(folder.glob("*.gguf")):
        return f"; name the GGUF file itself: --model {path}"
    for below in ("*", "snapshots/*"):  # the layouts of git clones and of the hub's cache
        for path in sorted(folder.glob(f"{below}/{CONFIG}")):
            return f"; there is one in {path.parent}"
    return ""


def head_dim(folder: Path, tower: bool = False) -> int:
    """Values per attention head of a consolidated checkpoint's decoder, or of its tower."""
    params = Section(read_json(folder / PARAMS), PARAMS)
    if tower:
        vision = params.section("vision_encoder")
        return vision.size("hidden_size") // vision.size("num_attention_heads")
    return params.size("head_dim", params.size("dim") // params.size("n_heads"))
