"""Histogram: bisect finds the same bucket for a value; totals and cumulative counts equal those of a list."""

import random
from bisect import bisect_left

from _fast.histogram import Histogram


def test_counts_are_those_of_a_bisection():
    draw = random.Random(1)
    bounds = [0.01, 0.025, 0.5, 1, 2.5, 80]
    histogram, counts, total = Histogram(bounds), [0] * 7, 0.0
    for value in [*bounds, 0.0, -1.0, 1e9, *(draw.lognormvariate(0, 3) for _ in range(2000))]:
        histogram.observe(value)
        counts[bisect_left(bounds, value)] += 1
        total += value
    assert histogram.counts == counts
    assert histogram.total == total
    names = ["0.01", "0.025", "0.5", "1.0", "2.5", "80.0", "+Inf"]
    assert histogram.buckets() == [(name, sum(counts[: at + 1])) for at, name in enumerate(names)]


def test_without_bounds_everything_is_behind_them():
    histogram = Histogram([])
    histogram.observe(3)
    assert (histogram.counts, histogram.buckets(), histogram.total) == ([1], [("+Inf", 1)], 3.0)
