"""Repeats: the lengths are those of the definition, and the time is linear for every text."""

import numpy as np
import pytest

from _fast.repeats import repeats


def lengths_of(tokens):
    found = np.full(len(tokens), -1, np.int32)
    repeats(np.asarray(tokens, np.int32), found)
    return found.tolist()


def defined(tokens):
    """Each length by comparing tokens one after another."""
    found = [0] * len(tokens)
    for distance in range(1, len(tokens)):
        while found[distance] < len(tokens) - distance and (
            tokens[-1 - found[distance]] == tokens[-1 - distance - found[distance]]
        ):
            found[distance] += 1
    return found


def test_lengths_are_those_of_the_definition():
    draw = np.random.default_rng(0)
    for number in range(400):
        tokens = draw.integers(0, 1 + number % 4, number % 40).tolist()
        assert lengths_of(tokens) == defined(tokens)
    assert lengths_of([5, 6, 9, 5, 6]) == [0, 0, 0, 2, 0]
    assert lengths_of([]) == []


def test_a_text_of_one_token_takes_one_pass():
    """A comparison of each distance alone would take 10^12 steps, and more than the test's time."""
    assert lengths_of([7] * 1_000_000)[1:4] == [999_999, 999_998, 999_997]


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 lengths for 3 tokens"):
        repeats(np.zeros(3, np.int32), np.zeros(2, np.int32))
