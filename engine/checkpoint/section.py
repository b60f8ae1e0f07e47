"""Section: one object of config.json with its path, so that an error about a wrong value names the key.

In: a parsed JSON object. Out: checked integers, numbers and booleans. `null` counts as missing, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.base.errors import ConfigError

_MISSING = object()
MAX_LAYERS = 4096  # most layers of a decoder or a tower: a mistyped count must not fill the memory
LARGEST = 2**31 - 1  # sizes beyond this are mistakes, and products of two still fit int64


class Section:
    """A JSON object and where it was found."""

    __slots__ = ("outer", "path", "values")

    def __init__(self, values: dict[str, Any], path: str, outer: Section | None = None) -> None:
        self.values = values
        self.path = path
        self.outer = outer  # the object that holds this one

    def section(self, key: str) -> Section:
        """The object below `key`."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: {key} must be an object, got {type(value).__name__}")
        return Section(value, f"{self.path}: {key}", self)

    def renamed(self, keys: Mapping[str, str]) -> Section:
        """A copy that also has the values of the old keys under the new names; `keys`: old name -> new name."""
        given = {new: self.values[old] for old, new in keys.items() if self.values.get(old) is not None}
        return Section({**self.values, **given}, self.path, self.outer)

    def integer(self, key: str, default: Any = _MISSING, least: int = 0, most: int = LARGEST) -> int:
        """An integer from `least` to `most`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"{self.path}: {key}={value!r} must be an integer from {least} to {most}")
        return value

    def size(self, key: str, default: Any = _MISSING) -> int:
        """An integer of at least 1."""
        return self.integer(key, default, least=1)

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise ConfigError(f"{self.path}: {key}={value!r} must be a number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path}: {key}={value!r} must be true or false")
        return value

    def items(self, key: str, default: Sequence[Any]) -> Sequence[Any]:
        """A list; its items are strings or numbers."""
        value = self._get(key, default)
        if value is not default and (not isinstance(value, list) or any(isinstance(v, list | dict) for v in value)):
            raise ConfigError(f"{self.path}: {key}={value!r} must be a list of strings or numbers")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ConfigError(f"{self.path}: {key} is missing")
            return default
        return value
