"""DraftConfig: how the next tokens of a row are guessed, so that one step can verify several of them.

In: the object of --speculative-config, in the words of vLLM. Out: a DraftConfig, or a ConfigError that names the key.
Thread: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.base.errors import ConfigError

FLAG = "--speculative-config"
MOST_DRAFTS = 64
MOST_LOOKUP = 32  # tokens of a match
KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
# Methods of other servers that have no drafter here.
OTHERS = ("suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash", "dspark", "peagle")


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Drafts that copy from the row's own text what followed an earlier place like the newest one."""

    num_tokens: int  # most drafts of a row in a step
    lookup_min: int = 1  # tokens that must match, at least
    lookup_max: int = 5  # and at most


def draft_config(given: Mapping[str, Any]) -> DraftConfig | None:
    """Reads the object of the flag; an empty object: no drafts. Raises ConfigError."""
    if not given:
        return None
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ConfigError(f"{FLAG}: unknown key {unknown[0]!r}; there are {', '.join(KEYS)}")
    method = given.get("method")
    if method != "ngram":
        what = "is not supported" if method in OTHERS else "is unknown"
        raise ConfigError(f'{FLAG}: method {method!r} {what}; use {{"method": "ngram", "num_speculative_tokens": 4}}')
    number = _number(given, "num_speculative_tokens", None, 1, MOST_DRAFTS)
    least = _number(given, "prompt_lookup_min", 1, 1, MOST_LOOKUP)
    most = _number(given, "prompt_lookup_max", max(5, least), 1, MOST_LOOKUP)
    if least > most:
        raise ConfigError(f"{FLAG}: prompt_lookup_min {least} is above prompt_lookup_max {most}; lower the first")
    return DraftConfig(number, least, most)


def _number(given: Mapping[str, Any], key: str, default: int | None, low: int, high: int) -> int:
    """A whole number of the object; without a default it must be there."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        got = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{FLAG}: {key} {got}; give a whole number from {low} to {high}")
    return value
