"""`python -m server info`: print what a bug report should start with: libraries, processor, driver, cards, flags,
model.

Owner: the main thread. In: the same flags as `serve`. Out: lines for people. Only configurations are loaded, and the
values of secret flags are not printed.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from server import __version__
from server.flags.config import Config

LIBRARIES = (
    *("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface-hub", "llguidance"),
    *("starlette", "uvicorn", "uvloop", "msgspec", "orjson", "av", "pillow", "soxr", "mistral-common", "tiktoken"),
)
# The processor features that our C kernels use, or that a faster version of them would; names of x86 and of Arm.
FEATURES = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile"),
    *("amx_bf16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)
NVIDIA, AMD = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")
GIB = 1 << 30


def lines(config: Config) -> Iterator[str]:
    """The lines that `info` prints. Raises ConfigError if there is no such model."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    yield f"omniloop {__version__}, {python}, {platform.platform()}"
    yield "libraries: " + ", ".join(libraries())
    yield from of_processor()
    yield from of_cards()
    yield "flags: " + (" ".join(flags(config)) or "none, so every value is its default")
    yield from of_model(config)


def libraries() -> Iterator[str]:
    """Name and version of each installed library, without importing it."""
    for name in LIBRARIES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def of_processor() -> Iterator[str]:
    """The processor, how many of its cores and how much memory this process may use, and which of our CPU
    kernels it runs.
    """
    from _fast import cpu
    from engine.device.host import usable_cores
    from engine.device.host_memory import available_memory

    name, found = processor(text_of(Path("/proc/cpuinfo")))
    yield f"processor: {name or platform.machine()}, {usable_cores()} of {os.cpu_count()} cores may be used"
    yield f"processor features: {' '.join(found) or 'unknown'}; kernels: {cpu.isa()}"
    yield f"memory: {available_memory() / GIB:.1f} GiB can be taken"


def processor(text: str) -> tuple[str, list[str]]:
    """Parse /proc/cpuinfo into (name, those of FEATURES that it has)."""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    held = set(flags[1].split()) if flags else set()
    return (name[1] if name else ""), [feature for feature in FEATURES if feature in held]


def of_cards() -> Iterator[str]:
    """The driver, and what torch reports about each card."""
    import torch

    yield f"driver: {driver() or 'none'}"
    if not torch.cuda.is_available():
        yield "cards: none that torch can use; the model runs on the CPU"
        return
    from engine.kernels.target import target

    for at in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(at)
        units = f"{facts.multi_processor_count} units"
        yield f"card {at}: {facts.name}, {target().arch}, {facts.total_memory / GIB:.1f} GiB, {units}"


def driver() -> str:
    """The kernel driver of NVIDIA or AMD cards and its version; "" if there is none."""
    if found := re.search(r"Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", text_of(NVIDIA)):
        return f"NVIDIA {found[1]}"
    version = text_of(AMD).strip()
    return f"amdgpu {version}" if version else ""


def text_of(path: Path) -> str:
    """The content of a kernel file such as /proc/cpuinfo; "" if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def flags(config: Config) -> Iterator[str]:
    """The flags whose values are not the default, as one would type them; secrets as ***."""
    for group in dataclasses.fields(config):
        section = getattr(config, group.name)
        usual = type(section)()
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if value == getattr(usual, field.name):
                continue
            name = field.name.replace("_", "-")
            if isinstance(value, bool):
                yield f"--{name}" if value else f"--no-{name}"
            elif field.metadata.get("hidden_value"):
                yield f"--{name} ***"
            else:
                yield f"--{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def of_model(config: Config) -> Iterator[str]:
    """Architecture, size, what prompts may contain, and the model's name for clients."""
    from engine.models.registry import family_of, load_model_config
    from server.start.folders import check_folder, hub_of, located

    folder = located(config, config.folder, hub_of(config), weights=False)
    check_folder(folder)
    flags, pooling = config.model, config.pooling
    model = load_model_config(
        folder, flags.hf_overrides, config.without_media, flags.model_impl, pooling.runner, pooling.pooler_config
    )
    text = model.text
    named = f"{model.architecture} ({family_of(model.architecture, model.implementation).name})"
    yield f"model: {named}, {len(text.layers)} layers of {text.hidden_size}, vocabulary {text.vocab_size}"
    yield f"takes {', '.join(model.modalities)}; context of {model.max_position} tokens; named {config.model_names[0]}"
