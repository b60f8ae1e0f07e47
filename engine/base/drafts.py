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
LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
KEYS = ("method", "model", "revision", "num_speculative_tokens", *LOOKUP)
NGRAM, EAGLE3, MTP = "ngram", "eagle3", "mtp"
# Methods of other servers that have no drafter here.
OTHERS = ("suffix", "draft_model", "eagle", "medusa", "mlp_speculator", "dflash", "dspark", "peagle")
EXAMPLES = '{"method": "ngram", "num_speculative_tokens": 4} or {"model": DRAFTER, "num_speculative_tokens": 3}'


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Drafts that copy from the row's own text what followed an earlier place like the newest one, or a drafter's."""

    num_tokens: int  # most drafts of a row in a step; 0: the drafter's files decide
    lookup_min: int = 1  # tokens that must match, at least
    lookup_max: int = 5  # and at most
    method: str = NGRAM  # or EAGLE3: a drafter's files; MTP: a layer of the model's own files
    model: str = ""  # the drafter's folder; "": no drafter


def draft_config(given: Mapping[str, Any]) -> DraftConfig | None:
    """Reads the object of the flag; an empty object: no drafts. Raises ConfigError."""
    if not given:
        return None
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ConfigError(f"{FLAG}: unknown key {unknown[0]!r}; there are {', '.join(KEYS)}")
    model = given.get("model") or ""
    method = given.get("method") or (EAGLE3 if model else None)  # the drafter's files have the last word
    if method not in (NGRAM, EAGLE3, MTP):
        what = "is not supported" if method in OTHERS else "is unknown"
        raise ConfigError(f"{FLAG}: method {method!r} {what}; use {EXAMPLES}")
    if not isinstance(model, str) or (method == EAGLE3) != bool(model):
        wanted = "names no drafter; give the folder or the repository of an EAGLE-3 head" if method == EAGLE3 else ""
        raise ConfigError(
            f"{FLAG}: model={given.get('model')!r} {wanted or f'is for a drafter; method {method} has none'}"
        )
    if method != NGRAM:
        wrong = next((key for key in LOOKUP if key in given), None)
        if wrong is not None:
            raise ConfigError(f"{FLAG}: {wrong} is for method ngram; leave it out")
        default, least = (0, 0) if method == EAGLE3 and "num_speculative_tokens" not in given else (None, 1)
        number = _number(given, "num_speculative_tokens", default, least, MOST_DRAFTS)
        return DraftConfig(number, method=method, model=model)
    number = _number(given, "num_speculative_tokens", None, 1, MOST_DRAFTS)
    low = _number(given, "prompt_lookup_min", 1, 1, MOST_LOOKUP)
    high = _number(given, "prompt_lookup_max", max(5, low), 1, MOST_LOOKUP)
    if low > high:
        raise ConfigError(f"{FLAG}: prompt_lookup_min {low} is above prompt_lookup_max {high}; lower the first")
    return DraftConfig(number, low, high)


def _number(given: Mapping[str, Any], key: str, default: int | None, low: int, high: int) -> int:
    """A whole number of the object; without a default it must be there."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        got = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{FLAG}: {key} {got}; give a whole number from {low} to {high}")
    return value
