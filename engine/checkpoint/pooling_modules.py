"""Reads modules.json of sentence-transformers, and the settings in the folders of its modules.

sentence-transformers has renamed the packages of its modules, so only the last part of a module's type is compared. The
files of version 5 (a flag for each kind of pooling) and 6 (`pooling_mode`) are read. In: a folder, a module's settings.
Out: the modules' names and paths, kinds of pooling, layers. Thread: any; its only side effect is to read files.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import get_args

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, PoolingKind
from engine.checkpoint.pooling_lexical import POOLING
from engine.checkpoint.section import Section

MODULES = "modules.json"
KINDS: dict[str, PoolingKind] = {  # keys: newer and older names in the files, and the names of --pooler-config
    "lasttoken": "last", "last": "last", "cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean",
    "max_tokens": "max", "max": "max", "mean_sqrt_len_tokens": "mean_sqrt_len", "mean_sqrt_len": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean", "weightedmean": "weighted_mean", "avg": "mean",
}  # fmt: skip
ACTIVATIONS = {  # the last part of a class of torch.nn -> its name in engine/pooling/heads
    "Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
}  # fmt: skip


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """(last part of the type, path) of each module, in order; [] if the file is missing. No path leaves the folder."""
    file = folder / MODULES
    if not file.is_file():
        return []
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        found = [(int(one["idx"]), str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: must be a list of objects with idx, path and type ({error!r})") from None
    for _, name, path in found:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or "\\" in path:
            raise ConfigError(f"{MODULES}: {name} has the path {path!r}, which leaves the folder")
        if name.endswith("Transformer") and path:
            raise ConfigError(f"{MODULES}: {name} lies in {path!r}; its files must lie in the folder itself")
    return [(name, path) for _, name, path in sorted(found)]


def is_lexical(folder: Path) -> bool:
    """Whether modules.json pools logits of the vocabulary."""
    return any(name == POOLING for name, _ in modules_of(folder))


def kind_of(section: Section) -> tuple[PoolingKind, bool]:
    """The kind of pooling, and whether prompts are pooled with the text; reads files of both versions."""
    mode = section.values.get("pooling_mode")
    flags = [
        name.removeprefix("pooling_mode_")
        for name, value in section.values.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    named = [str(mode)] if isinstance(mode, str) else [*(mode or flags)]
    if len(named) != 1 or named[0] not in KINDS:
        raise ConfigError(f"{section.path}: pooling {', '.join(named) or 'none'}; one of {', '.join(KINDS)} is needed")
    kind, pools_prompt = KINDS[named[0]], section.boolean("include_prompt", True)
    if kind == "cls" and not pools_prompt:
        raise ConfigError(
            f"{section.path}: include_prompt=false with {named[0]}: versions of sentence-transformers "
            "differ in which token they take; supported are the other kinds of pooling"
        )
    return kind, pools_prompt


def dense(section: Section, path: str, width: int) -> HeadLayer:
    """The layer with the settings `section`, in the folder `path`; `width`: output width of the preceding module."""
    size = section.size("in_features")
    if size != width:
        raise ConfigError(f"{section.path}: in_features={size}, and the module before it makes {width} numbers")
    bias = section.boolean("bias", True)
    if section.boolean("use_residual", False):
        raise ConfigError(f"{section.path}: use_residual=true is not supported; supported is false")
    activation = activation_named(section, "activation_function", "Tanh")
    return HeadLayer("linear", size, section.size("out_features"), bias, activation, folder=path)


def activation_named(section: Section, key: str, default: str) -> str:
    """Our name of the activation class that `section` names under `key`."""
    named = str(section.values.get(key) or default).rpartition(".")[2]
    if named not in ACTIVATIONS:
        raise ConfigError(f"{section.path}: {key}={named!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[named]


assert set(KINDS.values()) == set(get_args(PoolingKind))
