"""ScaledProducts: which products of FP8 codes the vendor's library multiplies; timed before graphs, and checked.

Owner: the device thread; each accelerator has its own. After the start nothing changes. The library multiplies codes
with a scale per row of either side, and on some cards codes with a scale per 128 columns by codes with a scale per
block of 128 rows and columns; other scales and --deterministic are for gemm/float8. A number of rows is
the library's only where its product was faster at the start and equal to ours but for rounding: a library that reads
scales in another order would be wrong in silence.

    a walk through the model's steps -> record: weights by shape -> autotune: time and check each
    Float8Weight -> is_librarys: whether so many rows are the library's
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

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

OURS, LIBRARYS = TORCHS, b"library"  # the rivals' names in `quickest`, whose first needs no gain
MULTIPLE = 16  # of both sides of a weight, which the library wants
AGREEMENT = 1e-2  # relative norm of what two ways may differ by: both round their results
Shape = tuple[int, int]  # width, depth


class ScaledProducts:
    """The choices of one accelerator."""

    def __init__(self) -> None:
        self._chosen: dict[Shape, dict[int, bool]] = {}  # by rows: whether they are the library's
        self._sizes: dict[Shape, list[int]] = {}  # the rows of `_chosen`, in order
        self._recorded: dict[Shape, list[Packed]] | None = {}  # None: timed

    def record(self, weight: Packed) -> None:
        """Notes a weight whose product `autotune` will time; after `autotune`, nothing."""
        if self._recorded is None:
            return
        shape = (len(weight.codes), weight.depth)
        if not suits(weight) or any(side % MULTIPLE for side in shape) or math.prod(shape) < LEAST_WEIGHT:
            return
        known = self._recorded.setdefault(shape, [])
        if all(other.codes is not weight.codes for other in known):
            known.append(weight)

    def is_librarys(self, rows: int, width: int, depth: int) -> bool:
        """Whether the library multiplies so many rows: as was found for the next number that was timed."""
        sizes = self._sizes.get((width, depth))
        if not sizes:
            return False
        return self._chosen[width, depth][sizes[min(bisect.bisect_left(sizes, rows), len(sizes) - 1)]]

    def autotune(self, sizes: Iterable[int], dtype: torch.dtype) -> None:
        """Settles what was recorded for these numbers of rows, of results in `dtype`."""
        wanted = sorted(set(sizes))
        recorded, self._recorded = self._recorded or {}, None
        for (width, depth), weights in recorded.items():
            try:
                self._chosen[width, depth] = {rows: _is_faster(weights, rows, dtype) for rows in wanted}
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # a library without such a product
                log.warning("products: FP8 %d x %d cannot be timed (%s): ours multiply", width, depth, error)
                continue
            self._sizes[width, depth] = wanted


def _is_faster(weights: list[Packed], rows: int, dtype: torch.dtype) -> bool:
    """Whether the library's product takes less time than ours, and says the same."""
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

    # From graphs, as steps launch them: one by one, a kernel of ours overlaps with itself as it never does in a step.
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
    """What replays a graph of these launches, which have run before; it takes no weight."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    return lambda _: graph.replay()
