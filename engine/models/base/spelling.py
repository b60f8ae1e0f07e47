"""How names of architectures are compared: by the family in them, whatever the class is for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def nearest_families(name: str, known: Iterable[str]) -> list[str]:
    """At most three of the known architectures, whose family is spelled much like the one in `name`."""
    families: dict[str, list[str]] = {}
    for architecture in known:
        families.setdefault(_family_in(architecture), []).append(architecture)
    near = difflib.get_close_matches(_family_in(name), families, n=3, cutoff=0.7)
    return [architecture for family in near for architecture in families[family]][:3]


def _family_in(architecture: str) -> str:
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture).lower()
