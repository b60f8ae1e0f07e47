"""How axes are dealt out over ranks, and the slices of a configuration."""

import pytest

from engine.base.dealing import Section, ranges, share, width, width_of


@pytest.mark.parametrize("units", [1, 2, 4, 7, 8, 48, 90, 231, 1000, 11008])
@pytest.mark.parametrize("coarse", [False, True])
def test_every_unit_belongs_to_one_rank(units, coarse):
    for ranks in range(1, 9):
        if units < ranks:
            continue
        bounds = [share(Section(units, 3, coarse), rank, ranks) for rank in range(ranks)]
        assert [unit for first, end in bounds for unit in range(first, end)] == list(range(units))
        sizes = [end - first for first, end in bounds]
        assert sizes == sorted(sizes, reverse=True)
        assert coarse or sizes[0] - sizes[-1] <= 1


def test_fewer_units_than_ranks_are_copied():
    assert [share(Section(2, 64), rank, 8) for rank in range(8)] == [(0, 1)] * 4 + [(1, 2)] * 4
    with pytest.raises(AssertionError, match="3 units on 4 ranks"):
        share(Section(3, 64), 0, 4)


def test_widths_are_dealt_out_in_granules():
    assert [width_of(width(11008), rank, 4) for rank in range(4)] == [2816, 2816, 2688, 2688]
    assert [width_of(width(100), rank, 3) for rank in range(3)] == [34, 33, 33]


def test_an_axis_of_several_sections_gives_a_range_of_each():
    joined = (Section(4, 8), Section(2, 8), Section(2, 8))
    assert ranges(joined, 1, 2) == [(16, 32), (40, 48), (56, 64)]
    assert ranges(joined, 3, 4) == [(24, 32), (40, 48), (56, 64)]
