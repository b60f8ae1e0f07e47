"""Reads and checks config_groups of compressed-tensors, the groups of modules.

In: the section of config.json. Out: the unchanged groups, with checked types for engine/quant/compressed.
"""

from __future__ import annotations

from typing import Any

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section

FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)


def groups_of(settings: Section) -> list[dict[str, Any]]:
    """The groups, in the file's order."""
    groups = settings.values.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError(f"{settings.path}: config_groups must be an object of objects")
    for name, group in groups.items():
        path = f"{settings.path}: config_groups.{name}"
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        for part, value in (("weights", weights), ("input_activations", inputs)):
            if not isinstance(value, dict):
                raise ConfigError(f"{path}.{part}={value!r} must be an object")
        names = group.get("targets") or []
        if not isinstance(names, list) or not all(isinstance(target, str) for target in names):
            raise ConfigError(f"{path}.targets={names!r} must be a list of names of modules")
        form = group.get("format") or settings.values.get("format") or "dense"
        if form not in FORMATS:
            raise ConfigError(f"{path}.format={form!r}; read are {', '.join(FORMATS)}")
        _check_weights(f"{path}.weights", weights, form)
        if inputs.get("type") == "int" and form == "int-quantized" and inputs.get("num_bits", 8) != 8:
            raise ConfigError(
                f"{path}.input_activations.num_bits={inputs['num_bits']}; integer weights need inputs of 8 "
                "bits: quantise the checkpoint again with 8"
            )
        if inputs.get("type") == "int" and form == "int-quantized" and not inputs.get("symmetric", True):
            raise ConfigError(
                f"{path}: input_activations with zero points; symmetric ones are read: quantise the checkpoint again "
                "with symmetric inputs"
            )
    return list(groups.values())


def _check_weights(path: str, weights: dict[str, Any], form: str) -> None:
    bits, size, blocks = weights.get("num_bits", 8), weights.get("group_size"), weights.get("block_structure")
    if type(bits) is not int or (form == "pack-quantized" and "num_bits" in weights and bits not in (4, 8)):
        raise ConfigError(f"{path}.num_bits={bits!r}; 4 and 8 are read: quantise the checkpoint again with one of them")
    if size is not None and type(size) is not int:
        raise ConfigError(f"{path}.group_size={size!r} must be a number of columns, or -1")
    if blocks and not _two_sizes(blocks):
        raise ConfigError(f"{path}.block_structure={blocks!r} must be two sizes, as [128, 128]")
    if not isinstance(weights.get("strategy", "tensor"), str):
        raise ConfigError(f"{path}.strategy={weights['strategy']!r} must be a word, as 'channel'")


def _two_sizes(blocks: object) -> bool:
    if isinstance(blocks, str):  # older: "128x128"
        found = blocks.split("x")
        return len(found) == 2 and all(size.isdecimal() and int(size) > 0 for size in found)
    return isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
