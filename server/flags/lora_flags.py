"""LoraFlags: adapters that requests choose by name (LoRA); a group of Config. Frozen, read everywhere."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from server.flags.flag import flag

NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
HASH = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class LoraFlags:
    """Flags of adapters in PEFT's format."""

    enable_lora: bool = flag(False, "serve LoRA adapters; a request names one as its model")
    lora_modules: tuple[str, ...] = flag(
        (), "adapters to load at start: NAME=FOLDER, NAME=ORG/NAME on the hub, or JSON; repeatable", several=True
    )
    max_loras: int = flag(1, "different adapters that one step computes", low=1, high=1024)
    max_lora_rank: int = flag(16, "largest rank of an adapter", low=1, high=1024)
    max_cpu_loras: int = flag(0, "adapters in host memory; 0: --max-loras and those of --lora-modules", low=0)
    lora_max_bytes: int = flag(1 << 31, "largest size of an adapter in memory", low=1)
    lora_target_modules: tuple[str, ...] = flag(
        (), "modules that adapters may change, such as q_proj; without it: all that are served", several=True
    )
    lora_dir: str = flag("", "folder where unknown model names, and paths of loads, are looked for")
    enable_runtime_lora: bool = flag(False, "routes that load and unload adapters; need --admin-api-key or loopback")
    lora_hub: bool = flag(False, "loads at run time may name ORG/NAME on the hub")


class Module(NamedTuple):
    """An adapter of --lora-modules."""

    name: str
    path: str  # a folder, or ORG/NAME[@revision][/subfolder] on the hub
    sha256: str  # the hash that its weights file must have; "": any


def module_of(text: str) -> Module:
    """An entry of --lora-modules. Raises ValueError."""
    if not text.startswith("{"):
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise ValueError("must be NAME=FOLDER, NAME=ORG/NAME, or a JSON object with name and path")
        return Module(checked_name(name), path, "")
    try:
        values = json.loads(text)
    except ValueError:
        raise ValueError("is not valid JSON") from None
    unknown = values.keys() - {"name", "path", "base_model_name", "sha256"}
    texts = [values.get(key) or "" for key in ("name", "path", "sha256", "base_model_name")]
    if unknown or not all(isinstance(each, str) for each in texts) or not texts[1]:
        raise ValueError("must have the texts name and path, and may have base_model_name and sha256")
    return Module(checked_name(texts[0]), texts[1], checked_hash(texts[2]))


def checked_name(name: str) -> str:
    """An adapter's name. Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError("the name must have 1 to 128 characters of A-Z, a-z, 0-9 and ._/-")
    return name


def checked_hash(text: str) -> str:
    """A SHA-256 in hexadecimal, in small letters; "" stays. Raises ValueError."""
    if text and not HASH.fullmatch(text):
        raise ValueError("sha256 must have 64 hexadecimal digits")
    return text.lower()


def check_lora(flags: LoraFlags, names: tuple[str, ...]) -> None:
    """Checks flags that depend on each other; `names`: the base's. Raises ValueError with the flag."""
    without = [name for name in ("lora_modules", "lora_dir", "enable_runtime_lora", "lora_hub") if getattr(flags, name)]
    if without and not flags.enable_lora:
        raise ValueError(f"--{without[0].replace('_', '-')}: needs --enable-lora")
    if flags.lora_hub and not flags.enable_runtime_lora:
        raise ValueError("--lora-hub: needs --enable-runtime-lora; --lora-modules may name the hub without it")
    if flags.enable_runtime_lora and not (flags.lora_dir or flags.lora_hub):
        raise ValueError("--enable-runtime-lora: needs --lora-dir, the folder that loads may read, or --lora-hub")
    seen = set(names)
    for text in flags.lora_modules:
        try:
            module = module_of(text)
        except ValueError as error:
            raise ValueError(f"--lora-modules {text[:128]}: {error}") from None
        if module.name in seen:
            raise ValueError(f"--lora-modules {module.name}: two models have this name")
        seen.add(module.name)
