"""Which numbers in a JSON Schema the grammar library enforces exactly, and which divisors it can handle.

Owner: none, pure functions; called in the pool. The library reads each number as a double: the integer 2**53 + 1
becomes 2**53, and the answer would contain another number than the schema demands; -2**63 ends the process.
"""

from __future__ import annotations

import math
from typing import Any

LEAST, MOST = 1e-18, 1e18
MOST_REMAINDERS = 10_000  # 0.1 s to compile; a million takes 6 s, and no limit of the library stops it
EXACT = "a number between -1e18 and 1e18 that a double holds"


def are_exact(value: Any) -> bool:
    """Whether the library represents every number in a JSON value exactly, at any depth."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, int | float) and not (abs(item) < MOST and float(item) == item):
            return False
    return True


def inside(bound: float, above: bool) -> float:
    """An exclusive bound that the library enforces: it accepts 1 as more than 1 if the other bound is below 2.

    An integer bound is replaced by the next double, and zero, whose next double has 324 digits, by 1e-18.
    """
    if bound != int(bound):
        return bound
    towards = math.inf if above else -math.inf
    return math.nextafter(bound, towards) if bound else math.copysign(LEAST, towards)


def num_remainders(divisor: int) -> int:
    """The states of the library's digit-by-digit check of multiples; trailing zeros of the divisor add none."""
    while divisor % 10 == 0:
        divisor //= 10
    return divisor
