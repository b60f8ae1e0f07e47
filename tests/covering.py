"""Selects the parameter combinations that `make test` runs: few combinations that still hold every pair of values.

With `covering(2)`, each pair of values of two different parameters occurs in at least one selected combination; with
`covering(1)`, each single value occurs. The other combinations are marked `full`: `make test-full` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def covering(rows: Sequence[dict[str, Any]], strength: int) -> list[int]:
    """Indices of few rows that cover all rows: every combination of `strength` values of different parameters occurs.

    Greedy: the next row is the one that adds the most new combinations; of equal rows the first.
    """
    held = [set(combinations(sorted(row.items()), min(strength, len(row)))) for row in rows]
    missing, taken = set().union(*held), []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(held[number] & missing))
        taken.append(best)
        missing -= held[best]
    return sorted(taken)
