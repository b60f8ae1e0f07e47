"""TimedProducts: the choices among ways to multiply that a start makes by timing; one object for each accelerator.

Owner: the device thread at start; then only read. The accelerators of one engine share their choices: the first one
with a product of some shape times it, and all of them multiply so. A product that every rank of a model computes, such
as a router's, then has the same bits on all of them; with other bits two ranks could choose other experts for a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine.kernels.gemm.algorithms import Algorithms, Kind
from engine.kernels.gemm.long_products import LongProducts
from engine.kernels.gemm.scaled import ScaledProducts


@dataclass(frozen=True, slots=True, eq=False)
class TimedProducts:
    """What one accelerator's products ask."""

    algorithms: Algorithms = field(default_factory=Algorithms)  # of the vendor's library, for float weights
    scaled: ScaledProducts = field(default_factory=ScaledProducts)  # for FP8 products
    long: LongProducts = field(default_factory=LongProducts)  # for many rows with codes

    def of_next_rank(self) -> TimedProducts:
        """For a further accelerator of the same kind, which makes the same choices."""
        return TimedProducts(
            Algorithms(self.algorithms.chosen), ScaledProducts(self.scaled.chosen), LongProducts(self.long.least)
        )

    def autotune(self, sizes: Sequence[int], dtype: torch.dtype, is_vendors: Callable[[Kind, int], bool]) -> None:
        """Times the recorded products for these numbers of rows; `is_vendors`: whether the vendor's library computes
        products of a kind with so many rows. The accelerator's device is current."""
        recorded, self.algorithms.recorded = self.algorithms.recorded, {}
        self.algorithms.autotune(recorded, lambda kind: sorted({rows for rows in sizes if is_vendors(kind, rows)}))
        self.scaled.autotune(sizes, dtype)
        self.long.autotune(sizes, dtype)
