"""PlaceMatrices: the memory of all places of adapters on an accelerator, and the place of each layer's matrices in it.

    values  place 1 | A and B of site 0 | A and B of site 1 | ...      place 2 | ...
    words   place 1: (offset, rank) of site 0, of site 1, ...; 0: the adapter leaves the site alone

Owner: the adapters part (engine/step/parts/adapters), allocated once at start. A is [pieces * rank, in_features] and B,
directly behind it, [out_features, rank], where `rank` is the adapter's own rank at the site, rounded up to UNIT and
filled up with zeros. So an adapter takes and moves the bytes of its own rank. A site of experts has A of all experts,
then B of all experts. Kernels of engine/kernels/lora read both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 16  # ranks are multiples: the depth of a matrix unit's step
RANK_BITS = 16  # a word is offset << RANK_BITS | rank
ALIGNED = 64  # values: A of a site begins at a multiple


@dataclass(frozen=True, slots=True)
class SiteShape:
    """The shape of one layer's matrices."""

    number: int  # of the site, from 0
    in_features: int
    out_features: tuple[int, ...]  # rows of each piece
    experts: int = 1  # matrices of each kind; a linear layer has one

    @property
    def width(self) -> int:
        """Rows of all pieces."""
        return sum(self.out_features)

    @property
    def pieces(self) -> int:
        """Matrices of the layer that share an input."""
        return len(self.out_features)

    def size(self, rank: int) -> int:
        """Values of A and B at a rank that is a multiple of UNIT."""
        values = self.experts * rank * (self.pieces * self.in_features + self.width)
        return -(-values // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True, eq=False)
class PlaceMatrices:
    """The memory of all places."""

    values: Tensor  # [places, values of a place], in the activations' dtype
    words: Tensor  # [places, sites] int64
    max_rank: int  # a multiple of UNIT

    @property
    def num_places(self) -> int:
        return len(self.values)


def rounded(rank: int) -> int:
    """The rank that an adapter takes in a place."""
    return -(-rank // UNIT) * UNIT


def place_size(sites: list[SiteShape], max_rank: int) -> int:
    """Values of a place, with room for the largest rank at every site."""
    return sum(site.size(rounded(max_rank)) for site in sites)


def empty_matrices(
    sites: list[SiteShape], places: int, max_rank: int, dtype: torch.dtype, device: torch.device | str
) -> PlaceMatrices:
    """Allocates the memory; all places are empty."""
    values = torch.zeros(places, place_size(sites, max_rank), dtype=dtype, device=device)
    words = torch.zeros(places, max(1, len(sites)), dtype=torch.int64, device=device)
    return PlaceMatrices(values, words, rounded(max_rank))


def word_of(offset: int, rank: int) -> int:
    """The word of a site in a place."""
    return offset << RANK_BITS | rank


def matrices_at(matrices: PlaceMatrices, place: int, shape: SiteShape) -> tuple[Tensor, Tensor] | None:
    """A [experts, pieces, rank, in_features] and B [experts, out_features, rank] of a place, from 1; None: the adapter
    leaves the site alone."""
    word = int(matrices.words[place - 1, shape.number])
    offset, rank = word >> RANK_BITS, word & ((1 << RANK_BITS) - 1)
    if not rank:
        return None
    values = matrices.values[place - 1]
    middle = offset + shape.experts * rank * shape.pieces * shape.in_features
    a = values[offset:middle].view(shape.experts, shape.pieces, rank, shape.in_features)
    return a, values[middle : middle + shape.experts * rank * shape.width].view(shape.experts, -1, rank)


def matrix_of(matrices: PlaceMatrices, key: int, shape: SiteShape) -> tuple[Tensor, Tensor] | None:
    """A [pieces, rank, in_features] and B [out_features, rank] of a key of a list (kernels/lora/rows)."""
    found = matrices_at(matrices, (key - 1) // shape.experts + 1, shape) if key else None
    return None if found is None else (found[0][(key - 1) % shape.experts], found[1][(key - 1) % shape.experts])
