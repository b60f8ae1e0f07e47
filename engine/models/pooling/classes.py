"""Names of encoders' classes in config.json.

Many encoders were saved with the head of their training (`...ForMaskedLM`, `...ForPreTraining`), which is not read.
Thread: any; pure.
"""

from __future__ import annotations

VECTORS_AND_SCORES = ("Model", "ForSequenceClassification")
ALL = (*VECTORS_AND_SCORES, "ForTokenClassification", "ForMaskedLM")


def classes(name: str, *endings: str) -> tuple[str, ...]:
    """A family's classes, which begin with its name."""
    return tuple(f"{name}{ending}" for ending in endings)
