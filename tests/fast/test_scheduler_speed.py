"""The scheduler's cost per step: 30 us for 256 rows on the machine of tests/pace.py, best of several rounds."""

import statistics

import pytest

from tests.bench.bench_scheduler import decode_case, prefix_case
from tests.pace import slowness

pytestmark = pytest.mark.alone
BUDGET_US = 30.0


def test_256_decode_rows_are_planned_and_settled_within_the_bound():
    rounds = [decode_case(256, 60) for _ in range(5)]
    for part in ("schedule", "commit"):
        assert min(statistics.median(case[part]) for case in rounds) < BUDGET_US * slowness()


def test_a_prefix_costs_about_a_microsecond_per_block():
    case = prefix_case(8192, rounds=5)
    assert min(case["cold"]) / 512 < 5 * slowness()
    assert min(case["warm"]) / 512 < 5 * slowness()
