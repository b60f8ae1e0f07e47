"""Random adapters in places, for kernel tests; places without an adapter and values behind an adapter are NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.lora.matrices import PlaceMatrices, SiteShape, empty_matrices, matrices_at, rounded, word_of

SHAPES = [SiteShape(0, 200, (72, 40, 40)), SiteShape(1, 96, (130,))]  # q|k|v, and a layer with one piece
EXPERTS = SiteShape(2, 64, (48, 48), experts=6)  # gate|up
RANKS = {1: 8, 2: 16, 4: 40, 5: 3}  # by place, of 5


def filled(
    dtype: torch.dtype, device: str = "cpu", places: int = 5, max_rank: int = 40, shapes: list[SiteShape] | None = None
) -> PlaceMatrices:
    """Places with adapters of RANKS at all sites; the adapter of place 2 changes only the first."""
    draw = torch.Generator().manual_seed(3)
    shapes = shapes or [*SHAPES, EXPERTS]
    matrices = empty_matrices(shapes, places, max_rank, dtype, "cpu")
    matrices.values.fill_(float("nan"))
    for place, rank in RANKS.items():
        offset = 0
        for shape in shapes[:1] if place == 2 else shapes:
            matrices.words[place - 1, shape.number] = word_of(offset, rounded(rank))
            found = matrices_at(matrices, place, shape)
            assert found is not None
            a, b = found
            for target in (a.transpose(2, 3), b):
                target.zero_()
                target[..., :rank] = torch.randn(*target.shape[:-1], rank, generator=draw).to(dtype) / 4
            offset += shape.size(rounded(rank))
    return PlaceMatrices(matrices.values.to(device), matrices.words.to(device), matrices.max_rank)


def numbers_of(rows: int, kind: str, device: str = "cpu") -> Tensor:
    """The place of each row, int32 [rows]: of one place, runs of each place, or drawn, with rows of the base."""
    if kind == "one":
        found = torch.full((rows,), 4)
    elif kind == "runs":
        found = torch.arange(rows) * 6 // max(1, rows)
    else:
        found = torch.randint(0, 6, (rows,), generator=torch.Generator().manual_seed(rows))
    found[found == 3] = 0
    return found.int().to(device)
