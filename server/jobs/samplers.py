"""DRY, top-n-sigma and XTC of a request: fields that most requests leave out.

Owner: loop, pure functions. In: the request's fields and the model's defaults. Out: arguments of SamplingParams.
engine/kernels/sampling/{dry,top_n_sigma,xtc} define what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.base.limits import MAX_DRY, MAX_HISTORY, MAX_SIGMA
from engine.base.request import SamplingParams
from server.errors import invalid, quoted, size_within
from server.flags.config import SAMPLERS
from server.render.vocabulary import Vocabulary
from server.schema.common import SamplingFields

PLAIN = SamplingParams()
BREAKERS = "dry_sequence_breakers"
MOST_BREAKERS, MOST_BYTES = 32, 40  # entries, and bytes of an entry
Number = Callable[[str, float, float, float], float]  # name, low, high, default -> the checked value


def has_samplers(body: SamplingFields, defaults: Mapping[str, Any]) -> bool:
    """Whether the request or the model's defaults have any of these fields."""
    return any(getattr(body, name) is not None or name in defaults for name in SAMPLERS)


def samplers_of(
    number: Number, body: SamplingFields, defaults: Mapping[str, Any], vocabulary: Vocabulary
) -> dict[str, Any]:
    """The arguments of SamplingParams; `number` reads and checks a field."""
    multiplier = number("dry_multiplier", 0.0, MAX_DRY, 0.0)
    breakers = breakers_of(body, defaults)
    if body.dry_sequence_breakers:
        vocabulary.require_texts(BREAKERS)
    return {
        "top_n_sigma": max(0.0, number("top_n_sigma", -1.0, MAX_SIGMA, 0.0)),
        "xtc_probability": number("xtc_probability", 0.0, 1.0, 0.0),
        "xtc_threshold": number("xtc_threshold", 0.0, 1.0, PLAIN.xtc_threshold),
        "dry_multiplier": multiplier,
        "dry_base": number("dry_base", 1.0, MAX_DRY, PLAIN.dry_base),
        "dry_allowed_length": _whole(number, "dry_allowed_length", 1, PLAIN.dry_allowed_length),
        "dry_penalty_last_n": _whole(number, "dry_penalty_last_n", -1, PLAIN.dry_penalty_last_n),
        "dry_breakers": vocabulary.holding(breakers) if multiplier else b"",
    }


def breakers_of(body: SamplingFields, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """The checked texts of `dry_sequence_breakers`."""
    asked = body.dry_sequence_breakers
    found = defaults.get(BREAKERS, ["\n", ":", '"', "*"]) if asked is None else asked
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise invalid(BREAKERS, f"{BREAKERS}: got {quoted(found)}; must be a list of texts")
    if len(found) > MOST_BREAKERS:
        raise invalid(BREAKERS, f"{BREAKERS}: got {len(found)} entries; at most {MOST_BREAKERS} are allowed")
    for at, text in enumerate(found):
        size = size_within(text, MOST_BYTES)
        if not 1 <= size <= MOST_BYTES:
            name = f"{BREAKERS}[{at}]"
            raise invalid(name, f"{name}: got {size} bytes; must be a text of 1 to {MOST_BYTES} bytes")
    return tuple(dict.fromkeys(found))


def _whole(number: Number, name: str, low: int, default: int) -> int:
    found = number(name, low, MAX_HISTORY, default)
    if int(found) != found:
        raise invalid(name, f"{name}: got {quoted(found)}; must be an integer")
    return int(found)
