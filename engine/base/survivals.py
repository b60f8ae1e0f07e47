"""Survivals of drafts that an operator sets, for measurements with drafters that are not trained.

    survival of place j = how often the drafts 1 .. j of a request are all right;  tokens of a step = 1 + their sum

In: keys of --speculative-config, in the words of vLLM. Out: a survival for each place, or a ConfigError that names the
key. Thread: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from engine.base.errors import ConfigError

RULE, MEAN, RATES = "rejection_sample_method", "synthetic_acceptance_length", "synthetic_acceptance_rates"
STANDARD, SYNTHETIC = "standard", "synthetic"
KEYS = (RULE, MEAN, RATES)


def survivals_of(flag: str, given: Mapping[str, Any], most: int, replays: bool) -> tuple[float, ...]:
    """The survivals of `most` drafts; empty: none are set. `replays`: the drafter takes them, not the verification."""
    rule = STANDARD if given.get(RULE) is None else given[RULE]
    keys = [key for key in (MEAN, RATES) if given.get(key) is not None]
    if rule not in (STANDARD, SYNTHETIC):
        raise ConfigError(f"{flag}: {RULE} is {rule!r}; give {STANDARD!r} or {SYNTHETIC!r}")
    if replays and rule == SYNTHETIC:
        raise ConfigError(f"{flag}: {RULE}={rule!r}: method replay itself sets how many drafts are right; leave it out")
    if rule == STANDARD and not replays:
        if keys:
            raise ConfigError(f"{flag}: {keys[0]} is for {RULE} {SYNTHETIC!r} and for method replay; leave it out")
        return ()
    if len(keys) > 1:
        raise ConfigError(f"{flag}: {MEAN} and {RATES} both set how many drafts are right; leave one out")
    if not keys and replays:
        return (1.0,) * most
    if not keys:
        raise ConfigError(f"{flag}: {RULE} is {SYNTHETIC!r}; give {MEAN} or {RATES} too")
    if not most:
        raise ConfigError(f"{flag}: {keys[0]} needs the number of drafts; give num_speculative_tokens too")
    return _of_mean(flag, given[MEAN], most) if keys[0] == MEAN else _of_rates(flag, given[RATES], most)


def _of_rates(flag: str, given: Any, most: int) -> tuple[float, ...]:
    """A list of survivals."""
    listed = given if isinstance(given, list) else []
    numbers = all(isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1 for rate in listed)
    if len(listed) != most or not numbers or any(later > rate for rate, later in pairwise(listed)):
        raise ConfigError(
            f"{flag}: {RATES} is {given!r}; give {most} numbers from 0 to 1, one for each draft, none above the one "
            "before: how often the drafts up to there are right"
        )
    return tuple(map(float, listed))


def _of_mean(flag: str, mean: Any, most: int) -> tuple[float, ...]:
    """The survivals a, a^2, a^3 ... that give `mean` tokens of a step, the target's own included."""
    if isinstance(mean, bool) or not isinstance(mean, int | float) or not 1 <= mean <= 1 + most:
        raise ConfigError(
            f"{flag}: {MEAN} is {mean!r}; give a number from 1 to {1 + most}: tokens of a step on average"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        few = sum(middle ** (1 + place) for place in range(most)) < mean - 1
        low, high = (middle, high) if few else (low, middle)
    return tuple(high ** (1 + place) for place in range(most))
