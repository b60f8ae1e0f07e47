"""LongProducts: finds, by timing at start, the number of rows from which on widening a whole weight first is faster.

Owner: the device thread; each accelerator has its own, and may share the choices of others (gemm/timed). Nothing
changes after the start. Other products widen a tile of codes again for every tile of rows. With many rows it is faster
to widen the weight once, into temporary memory, and to multiply as with a float weight (gemm/dense). --deterministic
uses the same kernel for all rows and does not use this.

    a walk through the model's steps -> record: a weight of each shape -> autotune: the least rows with a gain
    GroupWeight -> widens: whether to multiply this number of rows by the widened weight
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.gemm.algorithms import ENOUGH, FLOPS, HOST, LEAST_WEIGHT, TORCHS, Algorithms, Run, quickest, seconds
from engine.kernels.gemm.codes import Kind
from engine.kernels.gemm.dense import DenseWeight
from engine.kernels.gemm.dispatch import gated_choice, linear_choice
from engine.kernels.gemm.dispatch_codes import gated_by_tiles, linear_by_tiles
from engine.kernels.gemm.groups import Packed
from engine.kernels.gemm.widen_weight import widen_weight

log = logging.getLogger(__name__)

TILES, WHOLE = TORCHS, b"whole"  # names of the alternatives in `quickest`
# Numbers of rows that are timed, until widening gains. For gate|up of an 8B in 4 bits with its activation an H100
# takes, at 256, 512 and 1024 rows, 84, 147 and 293 us by tiles; in bfloat16 95, 148 and 287, plus 124 for widening.
# The tiles in float16 take 161 us for 256 rows without the activation.
SIZES = (192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 4096)
LEAST_ROWS = SIZES[0]
MOST_BYTES = 1 << 30  # largest widened weight
LAUNCHES = 3  # launches of a widened product: widening, product, activation


class Shape(NamedTuple):
    """Properties of a weight that determine its time."""

    kind: Kind
    width: int
    depth: int
    group: int
    zeros: bool
    activation: Activation | None  # set if the weight has gate's rows and up's rows


class LongProducts:
    """The choices of one accelerator."""

    def __init__(self, least: dict[Shape, float] | None = None) -> None:
        """`least`: the choices of other accelerators, which this one shares and adds to."""
        self.least = {} if least is None else least  # rows; inf: no number gains
        self._recorded: dict[Shape, Packed] | None = {}  # None: timing is done
        self._algorithms = Algorithms()  # torch chooses: a widened weight exists for one product only

    def widens(self, weight: Packed, rows: int, activation: Activation | None) -> bool:
        """Whether to multiply `rows` rows by the widened weight; before `autotune` it records the weight and returns
        False."""
        if rows < LEAST_ROWS:
            return False
        shape = _shape(weight, activation)
        if self._recorded is not None and weight.depth * len(weight.codes) >= LEAST_WEIGHT:
            self._recorded.setdefault(shape, weight)
        return rows >= self.least.get(shape, math.inf)

    def widened(self, weight: Packed, bias: Tensor | None, dtype: torch.dtype) -> DenseWeight:
        """The weight as floats; the caller's reference is the only one, so its memory is freed with it."""
        return DenseWeight(widen_weight(weight, dtype), None if bias is None else bias.to(dtype), self._algorithms)

    def autotune(self, sizes: Iterable[int], dtype: torch.dtype) -> None:
        """Times the recorded weights, for steps of up to the largest of `sizes`, unless another accelerator has done so
        for their shapes; launches all kernels of these steps once."""
        most = max(sizes, default=0)
        recorded, self._recorded = self._recorded or {}, None
        for shape, weight in recorded.items():
            if shape in self.least:
                self._launch_each(weight, self.least[shape], most, dtype, shape.activation)
            elif shape.width * shape.depth * dtype.itemsize <= MOST_BYTES:
                self.least[shape] = self._least_rows(shape, weight, most, dtype)

    def _least_rows(self, shape: Shape, weight: Packed, most: int, dtype: torch.dtype) -> float:
        """The least rows with a gain, timed."""
        name = f"{shape.kind.value} {shape.width} x {shape.depth}"
        timed = [rows for rows in SIZES if rows <= most]
        try:
            least = next((rows for rows in timed if self._gains(weight, rows, dtype, shape.activation)), math.inf)
            self._launch_each(weight, least, most, dtype, shape.activation)
        except torch.OutOfMemoryError as error:
            log.warning(
                "products: %s cannot be dequantised as a whole (%s): it is dequantised by tiles for any number of rows",
                name,
                error,
            )
            return math.inf
        if least < math.inf:
            log.info("products: %s is dequantised as a whole from %d rows on", name, least)
        return least

    def _gains(self, weight: Packed, rows: int, dtype: torch.dtype, activation: Activation | None) -> bool:
        x = torch.randn(rows, weight.depth, dtype=dtype, device=weight.codes.device)
        runs: dict[bytes, Run] = {
            TILES: functools.partial(by_tiles, x, weight, activation),
            WHOLE: functools.partial(self._whole, x, weight, activation),
        }
        for run in runs.values():  # a kernel is loaded when it is first launched
            run(weight.codes)
        times = math.ceil(ENOUGH / (2 * rows * len(weight.codes) * weight.depth / FLOPS))
        return quickest(runs, lambda rivals: seconds(rivals, [weight.codes], times, LAUNCHES * HOST), gain=1.0) == WHOLE

    def _whole(self, x: Tensor, weight: Packed, activation: Activation | None, _codes: Tensor) -> Tensor:
        wide = self.widened(weight, None, x.dtype)
        return wide.linear(x) if activation is None else wide.gated(x, activation)

    def _launch_each(
        self, weight: Packed, least: float, most: int, dtype: torch.dtype, activation: Activation | None
    ) -> None:
        """Launches each kernel of the widened product once, so that no later step compiles or loads a kernel."""
        if least > most:
            return
        width, depth = len(weight.codes), weight.depth
        last: dict[Hashable, int]  # choice of kernel -> the largest number of rows with this choice
        if activation is None:
            last = {linear_choice(size, width, depth): size for size in range(int(least), most + 1)}
        else:
            last = {gated_choice(size, width // 2, depth): size for size in range(int(least), most + 1)}
        rows = {size for size in SIZES if least <= size <= most} | {most, *last.values()}
        for size in sorted(rows):
            x = torch.zeros(size, weight.depth, dtype=dtype, device=weight.codes.device)
            self._whole(x, weight, activation, weight.codes)


def by_tiles(x: Tensor, weight: Packed, activation: Activation | None, _codes: Tensor) -> Tensor:
    """The product by tiles of codes, which are widened in registers."""
    if activation is not None:
        return gated_by_tiles(x, weight, None, activation)
    out = x.new_empty(len(x), len(weight.codes))
    linear_by_tiles(x, weight, None, None, out)
    return out


def _shape(weight: Packed, activation: Activation | None) -> Shape:
    return Shape(weight.kind, len(weight.codes), weight.depth, weight.group, weight.zeros is not None, activation)
