"""Which numbers of a JSON Schema the grammar library holds as they are written, and which divisors it can.

Owner: none, pure functions; called in the pool. The library reads each number as a double: the integer 2**53 + 1
becomes 2**53, and the answer would hold another number than the schema asks for; -2**63 ends the process.
"""

from __future__ import annotations

import math
from typing import Any

LEAST, MOST = 1e-18, 1e18
MOST_REMAINDERS = 10_000  # 0.1 s of a compile; a million takes 6 s, and no limit of the library's ends it
EXACT = "a number between -1e18 and 1e18 that a double holds"


def are_exact(value: Any) -> bool:
    """Whether every number in a JSON value, at any depth, is held."""
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
    """An exclusive bound that the library enforces: it takes 1 for more than 1 where the other bound is below 2.

    The next double takes its place, or 1e-18 for zero, whose next one has 324 digits.
    """
    if bound != int(bound):
        return bound
    towards = math.inf if above else -math.inf
    return math.nextafter(bound, towards) if bound else math.copysign(LEAST, towards)


def num_remainders(divisor: int) -> int:
    """States of the library's check of multiples, digit by digit; trailing zeros of the divisor add none."""
    while divisor % 10 == 0:
        divisor //= 10
    return divisor
