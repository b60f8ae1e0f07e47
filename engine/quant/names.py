"""Names of modules that configurations leave out of quantisation: asked where weights are random.

The lists name the quantiser's modules, not the files': with files the headers decide.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

USUAL = ("lm_head",)  # left out where nothing is said
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")


def is_left_out(module: str, patterns: Iterable[str]) -> bool:
    """Whether a list of names, beginnings, shell patterns or `re:` patterns has the module."""
    return any(_matches(f"{prefix}{module}", pattern) for prefix in PREFIXES for pattern in (*USUAL, *patterns))


def entry_of(module: str, entries: Mapping[str, Any]) -> Any:
    """What a table by names of modules says of this one; None: nothing."""
    return next((entries[name] for prefix in PREFIXES if (name := f"{prefix}{module}") in entries), None)


def targets(module: str, patterns: Iterable[str]) -> bool:
    """Whether a group of compressed-tensors is for this module, which is a Linear."""
    return any(
        pattern == "Linear" or _matches(f"{prefix}{module}", pattern) for prefix in PREFIXES for pattern in patterns
    )


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
