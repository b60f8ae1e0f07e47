"""Names of modules that configurations list: those left out of quantisation, and those that a group of settings is for.

The lists name the quantiser's modules, not the files'. With files the headers decide; the list of what is left out is
asked where weights are random, and for a warning. A mixture has tens of thousands of modules and releases list
hundreds of names, so a list is made ready once, and a module costs what its own name is long. Thread: any.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.base.errors import ConfigError

USUAL = ("lm_head",)  # left out where nothing is said
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.", "thinker.model.")
WILD = frozenset("*?[")


class Names:
    """A list of names, beginnings (whole components), shell patterns and `re:` patterns; `path`: where it stands.

    `inside`: a name may be of any components in a row, as transformers and AutoAWQ match (`self_attn`, `mlp.gate`).
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
        """Whether the list has the module, in front of which files and quantisers may write a prefix."""
        if self._inside and any(run in self._names for end in _ends(module) for run in _beginnings(end)):
            return True
        return any(self._has(f"{prefix}{module}") for prefix in PREFIXES)

    def _has(self, name: str) -> bool:
        listed = any(beginning in self._names for beginning in _beginnings(name))
        return listed or any(expression.match(name) for expression in self._expressions)


def left_out(patterns: Iterable[object], path: str, inside: bool = False) -> Names:
    """What a configuration leaves out of quantisation."""
    return Names((*USUAL, *map(str, patterns)), path, inside)


def entry_of(module: str, entries: Mapping[str, Any]) -> Any:
    """What a table by names of modules says of this one; None: nothing."""
    return next((entries[name] for prefix in PREFIXES if (name := f"{prefix}{module}") in entries), None)


def entry_around(module: str, entries: Mapping[str, Any]) -> Any:
    """What a table by names of modules says of this one, or of the nearest module around it; None: nothing."""
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
