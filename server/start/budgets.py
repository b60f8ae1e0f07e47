"""Budgets: default memory budgets, reduced to the memory that this process may use (SECURITY S44).

Owner: none, run once before the configuration is used. In: a Config, and the memory limit of the machine or the cgroup.
Out: the configuration with smaller budgets if the defaults would not fit together. Values that the operator has set are
not changed: only values that equal the default are.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from mm.limits import MediaLimits
from server.flags.command_line import size
from server.flags.config import Config, LimitsConfig

log = logging.getLogger("omniloop")

GIB, MIB = 1 << 30, 1 << 20
# Group, field, bytes per unit, and the share of the memory that it may take. All shares together are two thirds.
SHARES: tuple[tuple[str, str, int, float], ...] = (
    ("media", "decoded_budget_bytes", 1, 1 / 4),
    ("media", "request_decoded_bytes", 1, 1 / 8),  # part of the budget above
    ("media", "mm_processor_cache_gb", GIB, 1 / 8),
    ("limits", "body_budget_bytes", 1, 1 / 16),
    ("limits", "grammar_memory_bytes", 1, 1 / 16),  # two grammars compile at a time
    ("limits", "grammar_cache_bytes", 1, 1 / 32),
    ("limits", "response_store_bytes", 1, 1 / 64),
)
DEFAULTS = {"media": MediaLimits(), "limits": LimitsConfig()}


def fitted(config: Config, memory: int) -> Config:
    """The configuration for a process that may use `memory` bytes."""
    groups: dict[str, Any] = {}
    for group, name, value in _cuts(memory):
        fields = groups.get(group, getattr(config, group))
        if getattr(fields, name) == getattr(DEFAULTS[group], name):
            groups[group] = dataclasses.replace(fields, **{name: value})
    return dataclasses.replace(config, **groups)


def report(config: Config, memory: int) -> None:
    """Log which budgets of a fitted configuration the memory has reduced."""
    cut = [
        f"--{name.replace('_', '-')} {size(value) if isinstance(value, int) else round(value, 2)}"
        for group, name, value in _cuts(memory)
        if getattr(getattr(config, group), name) == value
    ]
    if cut:
        log.info("budgets follow the %.1f GiB of memory here: %s", memory / GIB, ", ".join(cut))


def _cuts(memory: int) -> Iterator[tuple[str, str, Any]]:
    """Group, field and value of each default that is too large for the memory."""
    for group, name, unit, share in SHARES:
        usual, most = getattr(DEFAULTS[group], name), memory * share / unit
        if most < usual:
            yield group, name, int(most) // MIB * MIB if unit == 1 else most
