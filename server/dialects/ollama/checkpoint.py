"""Facts about the served checkpoint for /api/tags, /api/ps and /api/show.

Owner: loop; files are read once, in the pool. In: the headers of the weights, the configuration and the tokenizer. Out:
numbers and names; no path of this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.base.errors import ConfigError
from server.dialects.ollama.frames import moment
from server.dialects.ollama.options import THEIRS
from server.state import AppState

if TYPE_CHECKING:
    from engine.weights.files import Shard

PACKED = ("U8", "I32")  # dtypes of weights of fewer than 8 bits in safetensors
MOST_LICENSE = 1 << 18  # bytes
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint."""

    size: int = 0  # bytes of weights
    parameters: int = 0
    modified: float = 0.0  # seconds since 1970
    digest: str = "0" * 64
    kind: str = ""  # the block type of most weights in a GGUF file; "": safetensors
    license: str = ""


async def files_of(state: AppState) -> Files:
    """The files of the served model, read at the first call."""
    settings = state.engine.model.raw.get("quantization_config") or {}
    bits = settings.get("bits") or settings.get("w_bit") or 4
    return await asyncio.get_running_loop().run_in_executor(state.pool, read, state.folder, int(bits))


@cache
def read(folder: str, bits: int) -> Files:
    """Read the headers in a folder; no sizes for random weights. `bits`: of a packed weight."""
    from engine.weights.files import open_checkpoint

    place = Path(folder)
    try:
        shards = open_checkpoint(place)
    except (ConfigError, OSError):
        shards = []
    stats = {shard.path.name: shard.path.stat() for shard in shards}
    names = "".join(f"{name} {stat.st_size}\n" for name, stat in sorted(stats.items()))
    config = place / "config.json"
    text = config.read_bytes() if config.is_file() else b""
    license_file = place / "LICENSE"
    readable = license_file.is_file() and license_file.stat().st_size <= MOST_LICENSE
    kinds = kinds_of(shards)
    return Files(
        size=sum(stat.st_size for stat in stats.values()),
        parameters=sum(parameters_of(shard, bits) for shard in shards),
        modified=max((stat.st_mtime for stat in stats.values()), default=0.0),
        digest=hashlib.sha256(names.encode() + text).hexdigest(),
        kind=max(kinds, key=kinds.__getitem__) if kinds else "",
        license=license_file.read_text("utf-8", "replace") if readable else "",
    )


def kinds_of(shards: Iterable[Shard]) -> dict[str, int]:
    """Bytes by block type, of GGUF files."""
    from engine.weights.ggml_blocks import BLOCKS

    found: dict[str, int] = {}
    for shard in shards:
        for name, info in shard.tensors.items() if shard.gguf is not None else ():
            kind = name.rpartition(".")[2]
            if kind in BLOCKS:
                found[kind] = found.get(kind, 0) + info.num_bytes
    return found


def parameters_of(shard: Shard, bits: int) -> int:
    """The number of weights in a file; packed weights count by their bits."""
    from engine.weights.ggml_blocks import BLOCKS

    count = 0
    for name, info in shard.tensors.items():
        block = BLOCKS.get(name.rpartition(".")[2]) if shard.gguf is not None else None
        if block is not None:
            count += info.num_bytes // block[1] * block[0]
        elif info.dtype in PACKED:
            count += info.num_bytes * 8 // bits
        else:
            size = 1
            for side in info.shape:
                size *= side
            count += size
    return count


def details(state: AppState, files: Files) -> dict[str, Any]:
    """`details` of a name."""
    model = state.engine.model
    family = str(model.raw.get("model_type") or "unknown")
    return {
        "parent_model": "",
        "format": "gguf" if files.kind else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": written(files.parameters),
        "quantization_level": files.kind.upper() or level(model.raw, str(model.torch_dtype)),
    }


def level(raw: dict[str, Any], dtype: str) -> str:
    """The form of the weights: the quantiser's method with its bits, or the dtype."""
    settings = raw.get("quantization_config") or {}
    method, bits = settings.get("quant_method"), settings.get("bits")
    if method:
        return f"{method}-{bits}BIT".upper() if bits else str(method).upper()
    name = dtype.removeprefix("torch.")
    return DTYPES.get(name, name.upper())


def written(count: int) -> str:
    """A number of parameters, as 8.2B or 596.0M; "" for 0."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count) if count else ""


def entry(state: AppState, files: Files, name: str) -> dict[str, Any]:
    """One served name."""
    return {
        "name": name,
        "model": name,
        "modified_at": moment(files.modified or state.created),
        "size": files.size,
        "digest": files.digest,
        "details": details(state, files),
    }


def numbers(state: AppState, files: Files) -> dict[str, str | int]:
    """`model_info`: numbers by the names of GGUF."""
    model = state.engine.model
    kind = str(model.raw.get("model_type") or "unknown")
    return {
        "general.architecture": kind,
        "general.parameter_count": files.parameters,
        f"{kind}.context_length": state.engine.max_model_len,
        f"{kind}.embedding_length": model.text.hidden_size,
        f"{kind}.block_count": len(model.text.layers),
        f"{kind}.attention.head_count": model.text.num_heads,
        f"{kind}.attention.head_count_kv": model.text.num_kv_heads,
        f"{kind}.vocab_size": model.text.vocab_size,
    }


def capabilities(state: AppState) -> list[str]:
    """The model's abilities in Ollama's words."""
    pooling, modalities = state.engine.model.pooling, state.engine.model.modalities
    found = {
        "completion": pooling is None,
        "tools": pooling is None and state.parsers.can_call,
        "vision": "image" in modalities,
        "audio": "audio" in modalities,
        "insert": pooling is None and state.renderer.fill_in is not None,
        "thinking": pooling is None and state.parsers.reads_any_reasoning,
        "embedding": pooling is not None and pooling.tasks[0] == "embed",
    }
    return [name for name, has in found.items() if has]


def parameters(state: AppState) -> str:
    """The default sampling options, one per line."""
    named = {THEIRS.get(name, name): value for name, value in state.defaults.items()}
    named |= {"num_predict": named.pop("max_new_tokens")} if "max_new_tokens" in named else {}
    return "\n".join(f"{name} {value}" for name, value in named.items())
