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
from torch import Tensor

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
from engine.kernels.gemm.float8 import BLOCK
from engine.kernels.gemm.float8_few import own_product
from engine.kernels.gemm.groups import Packed

log = logging.getLogger(__name__)

OURS, LIBRARYS = TORCHS, b"library"  # the rivals' names in `quickest`, whose first needs no gain
FOUR = 4  # rows of x, and blocks of columns of a weight, that the library reads at a time
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
        """A product that `autotune` will time, if it has not yet."""
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


def library_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    """As `float8_product`, by the library, where the weight `suits`; bias [N] of out's dtype."""
    e4m3 = torch.float8_e4m3fn
    if weight.blocks is not None:
        _blocks_product(x.view(e4m3), x_scales, weight.codes.view(e4m3), weight.blocks, bias, residual, out)
        return
    assert weight.row_scales is not None and weight.scales is None, "a scale per row of the weight"  # noqa: PT018
    x, codes = x.view(e4m3), weight.codes.view(e4m3).t()
    scales = {"scale_a": x_scales.view(-1, 1), "scale_b": weight.row_scales.view(1, -1)}
    # The library's fast accumulation keeps 14 bits of a sum.
    if residual is None:
        torch._scaled_mm(x, codes, **scales, bias=bias, out_dtype=out.dtype, use_fast_accum=False, out=out)
    else:
        product = torch._scaled_mm(x, codes, **scales, bias=bias, out_dtype=out.dtype, use_fast_accum=False)
        torch.add(residual, product, out=out)


def suits(weight: Packed) -> bool:
    """Whether the library knows such scales."""
    return weight.scales is None or weight.blocks is not None


def blocks_of(scale: Tensor) -> Tensor | None:
    """Scales [N, K / 128] of rows -> [N / 128, K / 128 in fours], as the library reads them; None: rows are unlike.

    The library reads the scales of a block's columns in fours, and what it finds beyond the last is not used.
    """
    if len(scale) % BLOCK:
        return None
    rows = scale.unflatten(0, (-1, BLOCK))
    if not bool((rows == rows[:, :1]).all()):
        return None
    return torch.nn.functional.pad(rows[:, 0].float(), (0, -scale.shape[1] % FOUR)).contiguous()


def _blocks_product(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    blocks: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """x [M, K], x_scales [K / 128, M], codes [N, K]: the library wants both scales column by column, and M in fours."""
    from torch.nn.functional import ScalingType

    rows, more = len(x), -len(x) % FOUR
    if more:
        x = torch.nn.functional.pad(x.view(torch.uint8), (0, 0, 0, more)).view(x.dtype)
        x_scales = torch.nn.functional.pad(x_scales, (0, more))
    direct = residual is None and not more
    y = out if direct else out.new_empty(len(x), out.shape[1])
    by_columns, by_blocks = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
    torch._scaled_mm_v2(
        x, codes.t(), [x_scales.t()], [by_columns], [], [blocks.t()], [by_blocks], [], None, out.dtype, (), False, out=y
    )
    if bias is not None:
        y += bias
    if residual is not None:
        torch.add(residual, y[:rows], out=out)
    elif not direct:
        out.copy_(y[:rows])


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
