"""Tensor names for error texts: names that differ only in the numbers of layers or experts are merged.

In: names. Out: `layers.0-31.mlp.up_proj.weight (32)`, so that an error fits in a line for a model of any depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

CACHE_SCALES = (
    "k_scale",
    "v_scale",
    "kv_scale",
    "q_scale",
    "prob_scale",
    "output_scale",
    "k_zero_point",
    "v_zero_point",
)


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of the KV cache or of attention, not of a weight."""
    module, _, kind = name.rpartition(".")
    if kind == "qscale_act":  # Mistral's names
        return module.endswith("_fake_quantizer")
    return (".self_attn" in module or ".mixer" in module) and kind in CACHE_SCALES


def compact(names: Iterable[str]) -> str:
    """The names in one line, separated by commas; runs of numbers as first-last, followed by the number of names."""
    groups: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}  # None: a number
    for name in names:
        parts = (name if name.isprintable() else ascii(name)[1:-1]).split(".")
        numbers = tuple(int(part) for part in parts if _counts(part))
        groups.setdefault(tuple(None if _counts(part) else part for part in parts), []).append(numbers)
    return ", ".join(_pattern(parts, found) for parts, found in groups.items())


def _counts(part: str) -> bool:
    """Whether a part of a name is the number of a layer or of an expert."""
    return part.isdecimal() and len(part) < 10


def _pattern(parts: tuple[str | None, ...], found: list[tuple[int, ...]]) -> str:
    axes = [sorted(set(axis)) for axis in zip(*found)]
    ranges = iter([_runs(axis) for axis in axes])
    name = ".".join(next(ranges) if part is None else part for part in parts)
    if len(found) == 1:
        return name
    whole = math.prod(map(len, axes)) == len(found)
    return f"{name} ({len(found)})" if whole else f"{len(found)} of {name}"


def _runs(numbers: list[int]) -> str:
    """Ascending numbers as `0-3,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
