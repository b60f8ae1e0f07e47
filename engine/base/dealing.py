"""How an axis of a tensor is dealt out over the ranks of an engine.

An axis is a sequence of sections. A section has units that no rank divides: heads, groups, single numbers of a width.
Every rank gets consecutive units of each section. If there are fewer units than ranks, each unit is copied to several
ranks. Values; thread: any.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

GRANULES = (128, 64, 32, 16, 8)  # kernels are faster on multiples of these numbers


class Section(NamedTuple):
    """A run of an axis."""

    units: int
    size: int = 1  # numbers per unit
    coarse: bool = False  # ranks get multiples of a granule, if the units suffice

    @property
    def length(self) -> int:
        """Numbers of the section."""
        return self.units * self.size


Axis = tuple[Section, ...]


def width(numbers: int) -> Section:
    """The section of an axis whose numbers are independent of each other: an MLP's width, a vocabulary."""
    return Section(numbers, coarse=True)


@cache  # loading asks for each matrix of each expert
def share(section: Section, rank: int, ranks: int) -> tuple[int, int]:
    """(first unit, end) of a rank. The first ranks get one unit or granule more if `ranks` does not divide."""
    units = section.units
    if units < ranks:
        assert ranks % units == 0, f"{units} units on {ranks} ranks"
        first = rank * units // ranks
        return first, first + 1
    granule = 1
    if section.coarse:
        granule = next((size for size in GRANULES if units % size == 0 and units // size >= ranks), 1)
    each, more = divmod(units // granule, ranks)
    first = rank * each + min(rank, more)
    return first * granule, (first + each + (rank < more)) * granule


def width_of(section: Section, rank: int, ranks: int) -> int:
    """How many numbers of the section a rank has."""
    first, end = share(section, rank, ranks)
    return (end - first) * section.size


def ranges(axis: Axis, rank: int, ranks: int) -> list[tuple[int, int]]:
    """The ranges [start, end) of the axis that a rank has, one for each section."""
    found, start = [], 0
    for section in axis:
        first, end = share(section, rank, ranks)
        found.append((start + first * section.size, start + end * section.size))
        start += section.length
    return found
