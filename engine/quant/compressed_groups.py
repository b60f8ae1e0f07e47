"""config_groups of compressed-tensors: the groups of modules, checked before anything is read by them.

In: the section of config.json. Out: the groups as they stand there, of the types that engine/quant/compressed needs.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.section import Section
from engine.errors import ConfigError


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
        size = weights.get("group_size")
        if size is not None and type(size) is not int:
            raise ConfigError(f"{path}.weights.group_size={size!r} must be a number of columns, or -1")
        blocks = weights.get("block_structure")
        if blocks and not _two_sizes(blocks):
            raise ConfigError(f"{path}.weights.block_structure={blocks!r} must be two sizes, as [128, 128]")
        if inputs.get("type") == "int" and not inputs.get("symmetric", True):
            raise ConfigError(
                f"{settings.path}: input_activations with zero points; symmetric ones are read: quantise the "
                "checkpoint again with symmetric inputs"
            )
    return list(groups.values())


def _two_sizes(blocks: object) -> bool:
    if isinstance(blocks, str):  # older: "128x128"
        found = blocks.split("x")
        return len(found) == 2 and all(size.isdecimal() and int(size) > 0 for size in found)
    return isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
