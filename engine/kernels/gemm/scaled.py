"""ScaledProducts: decides which FP8 products the vendor's library computes; timed and checked before graphs.

Owner: the device thread; each accelerator has its own, and may share the choices of others (gemm/timed). Nothing
changes after the start. The library multiplies operands with a scale per row, and on some cards codes with a scale per
128 columns by codes with a scale per block of 128 rows and columns; gemm/float8 computes other scales and
--deterministic. The library computes a number of rows only if its product was faster at the start and equal to ours
except for rounding, because a library that reads scales in another order would silently give wrong results.

    a walk through the model's steps -> record: weights by shape -> autotune: time and check each
    Float8Weight -> is_librarys: whether the library multiplies this number of rows
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.kernels.gemm.algorithms import (
    BYTES,
    COLD,
    ENOUGH,
    FLOPS,
    LEAST_WEIGHT,
    TORCHS,
    Run,
    quickest,
    seconds,
)
from engine.kernels.gemm.dispatch_float8 import own_product
from engine.kernels.gemm.float8_library import library_product, suits
from engine.kernels.gemm.groups import Packed

log = logging.getLogger(__name__)

OURS, LIBRARYS = TORCHS, b"library"  # names of the alternatives in `quickest`; OURS needs no gain
MULTIPLE = 16  # the library needs multiples of 16 for both dimensions of a weight
AGREEMENT = 1e-2  # allowed relative norm of the difference: both alternatives round their results
Shape = tuple[int, int]  # width, depth


class Librarys(NamedTuple):
    """Whether the library multiplies, by number of rows."""

    sizes: list[int]  # sorted
    found: list[bool]


NEVER = Librarys([], [])


class ScaledProducts:
    """The choices of one accelerator."""

    def __init__(self, chosen: dict[Shape, Librarys] | None = None) -> None:
        """`chosen`: the choices of other accelerators, which this one shares and adds to."""
        self.chosen = {} if chosen is None else chosen
        self._recorded: dict[Shape, list[Packed]] | None = {}  # None: timing is done

    def record(self, weight: Packed) -> None:
        """Records a weight whose product `autotune` will time; does nothing after `autotune`."""
        if self._recorded is None:
            return
        shape = (len(weight.codes), weight.depth)
        if not suits(weight) or any(side % MULTIPLE for side in shape) or math.prod(shape) < LEAST_WEIGHT:
            return
        known = self._recorded.setdefault(shape, [])
        if all(other.codes is not weight.codes for other in known):
            known.append(weight)

    def is_librarys(self, rows: int, width: int, depth: int) -> bool:
        """Whether the library multiplies `rows` rows: the choice of the next larger timed number."""
        sizes, found = self.chosen.get((width, depth), NEVER)
        return bool(sizes) and found[min(bisect.bisect_left(sizes, rows), len(sizes) - 1)]

    def autotune(self, sizes: Iterable[int], dtype: torch.dtype) -> None:
        """Times and checks the recorded weights for these numbers of rows, with results in `dtype`, unless another
        accelerator has done so for their shapes."""
        wanted = sorted(set(sizes))
        recorded, self._recorded = self._recorded or {}, None
        for (width, depth), weights in recorded.items():
            if (width, depth) in self.chosen:
                continue
            self.chosen[width, depth] = NEVER
            try:
                self.chosen[width, depth] = Librarys(wanted, [_is_faster(weights, rows, dtype) for rows in wanted])
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # a library without such a product
                log.warning("products: FP8 %d x %d cannot be timed (%s): ours multiply", width, depth, error)


def _is_faster(weights: list[Packed], rows: int, dtype: torch.dtype) -> bool:
    """Whether the library's product is faster than ours and gives the same result."""
    first = weights[0]
    width, depth = len(first.codes), first.depth
    device = first.codes.device
    x = torch.randint(0, 0x50, (rows, depth), dtype=torch.uint8, device=device)  # codes up to 32
    scales = torch.rand(1 if first.scales is None else first.scales.shape[1], rows, device=device) + 0.5
    found, wanted = (torch.empty(rows, width, dtype=dtype, device=device) for _ in range(2))
    library_product(x, scales, first, None, None, found)
    own_product(x, scales, first, None, None, wanted)
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-20))
    if not error < AGREEMENT:
        log.warning(
            "products: the library's FP8 %d x %d of %d rows is %.2g off: ours multiply", width, depth, rows, error
        )
        return False
    codes = [weight.codes for weight in weights]
    while sum(one.nbytes for one in codes) < COLD:
        codes.append(first.codes.clone())

    # Timed in graphs, as in steps: launched separately, our kernel would overlap with itself, which never happens in a
    # step.
    times = math.ceil(ENOUGH / max(2 * rows * width * depth / FLOPS, width * depth / BYTES))
    launched = [replace(first, codes=one) for one in (codes if times > 1 else codes[:1])]

    def librarys() -> None:
        for weight in launched:
            library_product(x, scales, weight, None, None, found)

    def ours() -> None:
        for weight in launched:
            own_product(x, scales, weight, None, None, wanted)

    runs = {OURS: _recorded(ours), LIBRARYS: _recorded(librarys)}
    return quickest(runs, lambda rivals: seconds(rivals, [x], 1), gain=1.0) == LIBRARYS


def _recorded(launch: Callable[[], None]) -> Run:
    """A function that replays a graph of these launches, which have run before; it ignores its argument."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    return lambda _: graph.replay()
