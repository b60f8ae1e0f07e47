"""The short form of a test with many parameters leaves out combinations, but no value and no pair of values."""

from itertools import combinations, product

import pytest

from tests.covering import covering

SIZES = {"dtype": 2, "shape": 4, "gated": 2, "splits": 3}
ROWS = [dict(zip(SIZES, values)) for values in product(*map(range, SIZES.values()))]


@pytest.mark.parametrize(("strength", "count"), [(1, 4), (2, 12)])
def test_every_value_meets_every_other_in_few_rows(strength, count):
    taken = covering(ROWS, strength)
    assert count <= len(taken) < 1.5 * count < len(ROWS) == 48
    for names in combinations(SIZES, strength):
        met = {tuple(ROWS[number][name] for name in names) for number in taken}
        assert met == set(product(*(range(SIZES[name]) for name in names)))


def test_one_parameter_and_no_rows_are_taken_whole():
    assert covering([{"a": k} for k in range(5)], 2) == [0, 1, 2, 3, 4]
    assert covering([], 2) == []


def test_combinations_that_do_not_exist_are_not_missed():
    assert covering([{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 1, "b": 0}], 2) == [0, 1, 2]
