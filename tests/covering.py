"""Which combinations of a test's parameters `make test` takes: few that still hold every pair of values.

A test marked `covering(2)` runs with combinations in which each value of each parameter meets each value of each other
parameter; `covering(1)` asks only that each value occurs. The other combinations become `full`: `make test-full` runs
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def covering(rows: Sequence[dict[str, Any]], strength: int) -> list[int]:
    """Numbers of rows that together hold what all rows hold: every `strength` values of different parameters at once.

    Greedy: the row that adds most comes next, the first of equal ones.
    """
    held = [set(combinations(sorted(row.items()), min(strength, len(row)))) for row in rows]
    missing, taken = set().union(*held), []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(held[number] & missing))
        taken.append(best)
        missing -= held[best]
    return sorted(taken)
