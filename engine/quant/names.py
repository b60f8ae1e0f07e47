"""Lists of module names in quantisation settings: modules left out, or modules that a group of settings applies to.

The lists use the quantiser's module names, not the files'. With files the headers decide which modules are quantised;
the list of modules left out is used with random weights, and for a warning. A mixture of experts has tens of thousands
of modules and releases list hundreds of names, so a list is prepared once, and a lookup costs only the length of the
module's name. Thread: any.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.base.errors import ConfigError

USUAL = ("lm_head",)  # left out by default
PREFIXES = (
    "", "model.", "model.language_model.", "language_model.model.", "language_model.", "thinker.model.", "backbone.",
)  # fmt: skip
WILD = frozenset("*?[")


class Names:
    """A list of names, prefixes of whole components, shell patterns and `re:` patterns; `path`: for error texts.

    `inside`: a name may match any consecutive components, as in transformers and AutoAWQ (`self_attn`, `mlp.gate`).
    """

    __slots__ = ("_expressions", "_inside", "_names")

    def __init__(self, entries: Iterable[str], path: str, inside: bool = False) -> None:
        listed = [entry.strip(".") if inside else entry for entry in entries]
        self._inside = inside
        self._names = {entry for entry in listed if not entry.startswith("re:")}
        shells = [fnmatch.translate(name) for name in self._names if WILD & set(name)]
        self._expressions = [re.compile("|".join(shells))] if shells else []
        for entry in listed:
            if entry.startswith("re:"):
                try:
                    self._expressions.append(re.compile(entry[3:]))
                except re.error as error:
                    raise ConfigError(f"{path}: {entry!r} is no regular expression: {error}") from None

    def __contains__(self, module: str) -> bool:
        """Whether the list matches the module, with any of the prefixes that files and quantisers use."""
        if self._inside and any(run in self._names for end in _ends(module) for run in _beginnings(end)):
            return True
        return any(self._has(f"{prefix}{module}") for prefix in PREFIXES)

    def _has(self, name: str) -> bool:
        listed = any(beginning in self._names for beginning in _beginnings(name))
        return listed or any(expression.match(name) for expression in self._expressions)


def left_out(patterns: Iterable[object], path: str, inside: bool = False) -> Names:
    """The names that a configuration leaves out of quantisation."""
    return Names((*USUAL, *map(str, patterns)), path, inside)


def entry_of(module: str, entries: Mapping[str, Any]) -> Any:
    """The entry of a module in a table by module names; None: no entry."""
    return next((entries[name] for prefix in PREFIXES if (name := f"{prefix}{module}") in entries), None)


def entry_around(module: str, entries: Mapping[str, Any]) -> Any:
    """The entry of a module, or of the nearest module around it, in a table by module names; None: no entry."""
    around = (name for prefix in PREFIXES for name in _beginnings(f"{prefix}{module}") if name in entries)
    found = max(around, key=lambda name: name.count("."), default=None)
    return None if found is None else entries[found]


def _beginnings(name: str) -> Iterator[str]:
    """a.b.c -> a, a.b, a.b.c."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)
    yield name


def _ends(name: str) -> Iterator[str]:
    """a.b.c -> a.b.c, b.c, c."""
    at = 0
    while at >= 0:
        yield name[at:]
        at = name.find(".", at) + 1 or -1
