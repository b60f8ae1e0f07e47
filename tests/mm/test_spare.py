"""Spare memory for pictures: who gets it, and that nobody else has it."""

import mmap

import numpy as np

from mm.decode.spare import LARGEST, SMALLEST, SparePages


def mapped(pixels: np.ndarray) -> bool:
    base = pixels.base
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def test_a_picture_takes_the_spare_and_keeps_it_alone() -> None:
    spare, size = SparePages(), SMALLEST + 5
    assert spare.wants(size)
    assert not mapped(spare.take(size))
    spare.fill(size)
    assert not spare.wants(size)
    first, second = spare.take(size), spare.take(size)
    assert (mapped(first), mapped(second)) == (True, False)
    assert len(first) == len(second) == size
    first[:] = 7
    spare.fill(size)
    third = spare.take(size)
    third[:] = 9
    assert (first == 7).all()
    assert spare.wants(size)


def test_a_smaller_picture_leaves_no_more_than_it_uses() -> None:
    spare = SparePages()
    spare.fill(3 * SMALLEST)
    pixels = spare.take(2 * SMALLEST + 1)
    assert mapped(pixels)
    assert len(pixels) == 2 * SMALLEST + 1
    pixels[:] = 1


def test_a_spare_that_does_not_suit_stays() -> None:
    spare, size = SparePages(), 4 * SMALLEST
    spare.fill(size)
    for other in (SMALLEST, 2 * size):
        assert spare.wants(other)
        assert not mapped(spare.take(other))
    assert mapped(spare.take(size))


def test_one_spare_of_bounded_size() -> None:
    spare = SparePages()
    assert not spare.wants(SMALLEST - 1)
    assert not spare.wants(LARGEST + 1)
    spare.fill(SMALLEST)
    spare.fill(3 * SMALLEST)
    assert spare.nbytes == 3 * SMALLEST
    assert len(spare.take(3 * SMALLEST)) == 3 * SMALLEST
    assert spare.nbytes == 0
    assert spare.wants(SMALLEST)
