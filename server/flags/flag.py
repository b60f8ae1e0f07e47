"""flag: a field of a configuration that is a flag of the command line, with its help text."""

from __future__ import annotations

from dataclasses import field
from typing import Any

MIB = 1 << 20


def flag(default: Any, text: str, **hints: Any) -> Any:
    """A field with its help text; hints: `tokens` (accepts 32k), `hidden_value` (never printed), `short`."""
    metadata = {"help": text, **hints}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)
