"""Which token counts have a graph, and their capture: decode steps, mixed steps, and the choice of tokens.

Thread: device, at start. A graph's key is its padded token count; a step takes the smallest that holds it. Captured
from large to small, so that the shared pool is as large as the largest needs and every smaller one fits into it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Protocol

DECODE, MIXED = 0, 1
MIXED_LIMIT = 2048  # tokens; longer steps spend so little of their time on launches that they run eagerly
RATIO = 1.125  # from one mixed size to the next: at most 12 % of a step is padding


class Capture(Protocol):
    """The accelerator's side: records what `body` launches, returns the executable graph's handle."""

    def __call__(self, body: Callable[[], None]) -> int: ...


def decode_sizes(max_rows: int, chosen: tuple[int, ...] = ()) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to the rows that a step can have; or the operator's choice."""
    if chosen:
        return sorted({size for size in chosen if 1 <= size <= max_rows})
    return sorted({size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows} | {max_rows})


def mixed_sizes(max_tokens: int) -> list[int]:
    """16, then steps of RATIO in multiples of 16 up to the limit."""
    limit, sizes = min(max_tokens, MIXED_LIMIT), [16]
    while sizes[-1] < limit:
        size = max(sizes[-1] + 16, math.floor(sizes[-1] * RATIO / 16) * 16)
        sizes.append(min(size, limit))
    return [size for size in sizes if size <= limit]


def padded(sizes: list[int], count: int) -> int:
    """The smallest size that holds `count`; 0: none does."""
    at = bisect.bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else 0
