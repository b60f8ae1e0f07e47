"""The sizes of steps for which graphs are captured."""

import itertools
from dataclasses import replace

import pytest

from engine.step.sizes import (
    LONG_LIMIT,
    MIXED_LIMIT,
    Sizes,
    decode_sizes,
    fewer_decode_sizes,
    fewer_mixed_sizes,
    mixed_sizes,
    one_size_per_doubling,
    sizes_for_other_kernels,
)


@pytest.mark.parametrize("limit", [MIXED_LIMIT, LONG_LIMIT])
def test_mixed_sizes_are_tiles_and_waste_little(limit):
    sizes = mixed_sizes(limit)
    assert sizes[-1] == limit == mixed_sizes(2 * LONG_LIMIT)[len(sizes) - 1]
    assert {256, 512, 1024, 1536} <= set(sizes)  # sizes that fill a product's tiles are not padded further
    for smaller, larger in itertools.pairwise(sizes):
        assert larger - smaller <= max(16, 0.125 * smaller)


def test_the_most_that_a_step_can_have_is_a_size():
    for most in (1, 15, 16, 24, 300, 2000, 9000):
        sizes = mixed_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


def test_with_drafts_the_verify_steps_of_one_row_have_sizes():
    sizes = Sizes(
        max_rows=4, max_tokens=256, max_slots=4, max_model_len=64, max_chunk=256, block_size=16, encoder_rows=0
    )
    assert sizes.mixed == mixed_sizes(256)
    assert replace(sizes, width=5).mixed == [2, 3, 4, 8, *mixed_sizes(256)]
    assert replace(sizes, width=5, max_tokens=3).mixed == [2, 3]


@pytest.mark.parametrize(("most", "count"), [(2048, 17), (1000, 14), (500, 10), (20, 2)])
def test_another_forward_has_few_mixed_sizes(most, count):
    """A start records a second graph at each of them."""
    sizes = fewer_mixed_sizes(most)
    assert len(sizes) == count
    assert set(sizes) <= set(mixed_sizes(most))
    assert sizes[-1] == most
    for smaller, larger in itertools.pairwise(sizes):
        assert larger <= (2 if larger <= 32 else 1.5 if larger <= 512 else 1.25) * (smaller + 1)


def test_another_forward_has_few_decode_sizes():
    assert fewer_decode_sizes(256) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
    assert fewer_decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert fewer_decode_sizes(20, (3, 7)) == [3, 7]


def test_decode_sizes_are_the_operators_choice_where_there_is_one():
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(20, (3, 7, 7)) == [3, 7]


def test_kernels_are_looked_for_at_the_last_size_of_each_doubling():
    assert one_size_per_doubling(decode_sizes(256)) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert one_size_per_doubling(decode_sizes(100)) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert one_size_per_doubling(mixed_sizes(1000)) == [16, 32, 64, 128, 256, 512, 1000]
    assert one_size_per_doubling([3]) == [3]
    assert one_size_per_doubling([]) == []


def test_a_kernel_that_no_chosen_size_runs_gets_a_size_of_its_own():
    def way(rows):
        return "between" if 129 <= rows <= 192 else rows > 500

    sizes = one_size_per_doubling(decode_sizes(256)) + one_size_per_doubling(mixed_sizes(2048))
    assert sizes_for_other_kernels(sizes, 2048, way) == [192]
    assert sizes_for_other_kernels(sizes, 128, way) == []
    assert sizes_for_other_kernels([1], 2048, way) == [192, 2048]


def test_long_steps_of_several_ranks_are_graphs():
    sizes = Sizes(8, 8192, 16, 9000, 8192, 16, 16384)
    assert (sizes.most_graphed, replace(sizes, ranks=2).most_graphed) == (MIXED_LIMIT, 8192)
