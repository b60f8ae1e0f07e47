"""Collects a checkpoint's quantisation settings in `quantization_config`, wherever the quantiser wrote them.

In: config.json as a Section, and the folder, where older tools write further files. Out: the same Section with
`quantization_config`, whose `quant_method` is spelled as in engine/quant/dialects.py, or ConfigError. Thread: any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.checkpoint.files import read_json
from engine.checkpoint.section import Section
from engine.quant.dialects import DIALECTS

READ = tuple(name for name in DIALECTS if " " not in name)  # methods that checkpoints may name
UNKNOWN = "unknown"  # method of settings that name none
SETTINGS = ("quantization_config", "compression_config")
# quant_method in some files -> key of DIALECTS.
SPELLED = {
    "intel/auto-round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp8": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}
# Objects in which models with towers may have the settings, if the root has none (for example InternVL's AWQ releases).
DECODERS = (
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    ("thinker_config",),
    ("thinker_config", "text_config"),
)


def refuse_quantized(root: Section) -> None:
    """ConfigError if no dialect of engine/quant reads the checkpoint's quantisation."""
    given = root.values.get("quantization_config") is not None
    settings = root.section("quantization_config") if given else Section({}, root.path)
    method = settings.values.get("quant_method", UNKNOWN)
    if root.values.get("quantization") is not None and method == UNKNOWN:  # newer files also have quantization_config
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
    """The configuration with `quantization_config`, taken from wherever the checkpoint has it.

    The decoder's object has the lowest priority, because it may hold outdated settings: NVIDIA's Kimi-K2.5 in NVFP4 has
    the INT4 release's settings there, and its own settings in a file next to config.json.
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
    """The object at this path, or {}."""
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


# Settings files next to config.json, written by older releases of the quantisers -> reader.
BESIDE = {"hf_quant_config.json": _modelopt, "quantize_config.json": _gptq, "quant_config.json": _awq}
