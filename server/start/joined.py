"""Join a checkpoint whose config.json names other repositories for its decoder and encoder into one folder.

Owner: a thread of the pool, at start, before the engine exists. In: the folder of the checkpoint, and a function that
brings another repository into a folder. Out: a folder whose config.json contains the configurations of the parts, and
whose other files are links to the files of all parts. The folder is in that of Hugging Face, or in --download-dir, and
its name is a hash of its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.base.errors import ConfigError
from engine.checkpoint.files import CONFIG, read_json

if TYPE_CHECKING:
    from engine.weights.files import Shard

INDEX = "model.safetensors.index.json"
# Key that names a repository -> (section of config.json for its configuration, prefix of that part's tensors in the
# checkpoint itself).
PARTS = {"text_model_id": ("text_config", "language_model."), "audio_model_id": ("audio_config", "audio_tower.")}
Locate = Callable[[str, bool], tuple[Path, "list[Shard]"]]  # (repository, with weights) -> (folder, headers)


def is_split(folder: str | Path) -> bool:
    """Whether parts of the checkpoint are in other repositories."""
    return bool(_named(read_json(Path(folder) / CONFIG, required=False)))


def join(folder: Path, own: list[Shard], locate: Locate, cache: str, weights: bool) -> tuple[Path, list[Shard]]:
    """The joined folder and the headers of all its weights. `own` are the headers of the checkpoint's own weights, if
    weights are wanted."""
    config = read_json(folder / CONFIG)
    named, shards, others = _named(config), list(own), _other_files(folder)
    for key, name in named.items():
        section, prefix = PARTS[key]
        inside = any(tensor.startswith(prefix) for shard in own for tensor in shard.tensors)
        part, found = locate(name, weights and not inside)
        config[section] = read_json(part / CONFIG)
        config[key], config[f"joined_{key}"] = None, None if inside else name
        shards += found
        others = {**_other_files(part), **others}
    if any(shard.names is not None for shard in shards):
        raise ConfigError(f"{folder}: a part of it has Mistral's layout, which cannot be joined with others")
    return _written(config, others, shards, Path(cache or _home())), shards


def _named(config: dict[str, Any]) -> dict[str, str]:
    if config.get("model_type") != "ultravox":
        return {}
    return {key: str(config[key]) for key in PARTS if config.get(key)}


def _home() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "omniloop"


def _other_files(folder: Path) -> dict[str, Path]:
    """Tokenizer files, templates and similar files: name -> path."""
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: path.resolve() for path in files if path.suffix in (".json", ".jinja", ".model", ".txt")}


def _written(config: dict[str, Any], others: dict[str, Path], shards: list[Shard], base: Path) -> Path:
    links = {name: path for name, path in others.items() if name != CONFIG and not name.endswith(INDEX)}
    owners: dict[str, str] = {}
    for number, shard in enumerate(shards):
        if shard.path.exists():  # the file is absent if only its header was fetched
            links[f"part-{number}.safetensors"] = shard.path.resolve()
            owners |= dict.fromkeys(shard.tensors, f"part-{number}.safetensors")
    texts = {CONFIG: json.dumps(config, sort_keys=True)}
    if owners:
        texts[INDEX] = json.dumps({"metadata": {}, "weight_map": owners}, sort_keys=True)
    content = json.dumps([texts, {name: str(path) for name, path in sorted(links.items())}], sort_keys=True)
    folder = base / f"joined-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        base.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=base))
        for name, path in links.items():
            os.symlink(path, draft / name)
        for name, text in texts.items():
            (draft / name).write_text(text)
        try:
            draft.rename(folder)
        except OSError:  # another process made the folder first
            shutil.rmtree(draft)
    return folder
