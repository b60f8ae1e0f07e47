"""Times: seconds of steps by size, measured at start, by which the scheduler decides how many drafts a step verifies.

Thread: device, at start. A few sizes are measured. The times between them are interpolated, those beyond continue the
last slope, and no larger step takes less time than a smaller one (_fast/budget: Budget.set_times).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

MOST_SECONDS = 0.4  # for all measurements of a start


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """float64 arrays by size, from 0 on; see Budget.set_times."""

    plain: np.ndarray  # by rows: a step in which every row has one token
    mixed: np.ndarray  # by tokens: the forward of any other step
    choice: np.ndarray  # by places for which a token is chosen
    reading: float = 0.0  # in addition, for each token of the rows' contexts
    # Of a drafter's first pass, and of each further pass, by rows with drafts; empty: it has no such passes.
    first: np.ndarray = field(default_factory=lambda: np.zeros(0))
    further: np.ndarray = field(default_factory=lambda: np.zeros(0))
    pass_reading: float = 0.0  # of a pass, in addition, for each token of its rows' contexts


def some(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of ascending sizes, the first and the last included, with about equal ratios."""
    if len(sizes) <= count:
        return list(sizes)
    wanted = np.geomspace(sizes[0], sizes[-1], count)
    return sorted({min(sizes, key=lambda size: abs(size - value)) for value in wanted})


def curve(measured: dict[int, float], most: int, sizes: Sequence[int] = ()) -> np.ndarray:
    """Seconds float64 [most + 1] by size, from seconds of some sizes.

    `sizes`: ascending sizes of graphs; a step takes the time of the smallest that fits.
    """
    known = sorted(measured)
    values = np.maximum.accumulate([measured[size] for size in known])
    number = np.arange(most + 1)
    if len(sizes):
        place = np.searchsorted(sizes, number)
        number = np.where(place < len(sizes), np.asarray(sizes)[np.minimum(place, len(sizes) - 1)], number)
    found = np.interp(number, known, values)
    if len(known) > 1:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        found += slope * np.maximum(number - known[-1], 0)
    return np.maximum.accumulate(found)


def timed(
    calls: Sequence[tuple[int, Callable[[], float]]], until: float, clock: Callable[[], float]
) -> dict[int, float]:
    """Seconds by size; each call runs a step of a size and returns its seconds. After `until` on the clock only the
    first two are measured."""
    found: dict[int, float] = {}
    for size, call in calls:
        if len(found) >= 2 and clock() >= until:
            break
        found[size] = call()
    return found
