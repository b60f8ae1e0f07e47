"""`dynamic` in GPTQ's settings: regular expressions for modules with their own format or without quantisation.

In: the settings in config.json. Out: the settings of one module that override the checkpoint's: bits, group_size,
sym, desc_act. An expression after "-:" names modules that are not quantised; "+:" has no effect. The first expression
that matches counts, as in GPTQModel (https://github.com/ModelCloud/GPTQModel, QuantizeConfig.dynamic_get).
"""

from __future__ import annotations

import re
from typing import Protocol

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.quant.names import PREFIXES


class Own(Protocol):
    """Settings of single modules."""

    def of(self, module: str) -> Section | None:
        """Settings of this module; None: the module is not quantised."""


class Dynamic:
    """The table of one checkpoint."""

    def __init__(self, settings: Section) -> None:
        self._rules: list[tuple[re.Pattern[str], Section | None]] = []  # None: not quantised
        if not settings.values.get("dynamic"):
            return
        table = settings.section("dynamic")
        for name, value in table.values.items():
            try:
                pattern = re.compile(name.removeprefix("-:").removeprefix("+:"))
            except re.error as error:
                raise ConfigError(f"{table.path}: {name!r} is no regular expression: {error}") from None
            if name.startswith("-:"):
                self._rules.append((pattern, None))
                continue
            own = table.section(name) if value else Section({}, table.path)
            if (bits := own.integer("bits", 4)) not in (4, 8):
                raise ConfigError(
                    f"{own.path}: bits={bits}; 4 and 8 are read: quantise the checkpoint again with one of them"
                )
            self._rules.append((pattern, own))

    def of(self, module: str) -> Section | None:
        """Settings that override the checkpoint's for this module; None: the module is not quantised."""
        for pattern, own in self._rules:
            if any(pattern.match(f"{prefix}{module}") for prefix in PREFIXES):
                return own
        return Section({}, "")
