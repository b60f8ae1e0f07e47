"""Compares names of architectures by the family in the name, without the ending that names the class's task."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def nearest_families(name: str, known: Iterable[str]) -> list[str]:
    """At most three known architectures whose family is spelled similarly to the family in `name`."""
    families: dict[str, list[str]] = {}
    for architecture in known:
        families.setdefault(_family_in(architecture), []).append(architecture)
    near = difflib.get_close_matches(_family_in(name), families, n=3, cutoff=0.7)
    return [architecture for family in near for architecture in families[family]][:3]


def _family_in(architecture: str) -> str:
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture).lower()
