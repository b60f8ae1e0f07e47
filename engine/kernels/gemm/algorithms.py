"""Algorithms: chooses the vendor library's algorithm for each product; timed once per card and library, before graphs.

Owner: the device thread; each accelerator has its own, and may share the choices of others (gemm/timed). After the
start choices change only if the library refuses one. torch takes the library's first suggestion (gemm/cublaslt), which
is often slower than another algorithm: on an H100 an 8B's down of 256 rows takes 51.9 us instead of 46.6, a 0.6B's of
576, 704 and 1,152 rows 14.1, 15.0 and 18.4 instead of 9.3, 10.2 and 13.8. Each number of rows that has a graph is timed
with several algorithms. The choices are saved for the next start, in the folder of Triton's kernels.

    recording: a walk through the model's steps -> products -> autotune: read saved choices, time the rest, save them
    DenseWeight -> run_chosen: launches the shape's algorithm; or nothing, and torch multiplies with its own choice
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.cublaslt import (
    ALGORITHM_BYTES,
    ALIGNMENT,
    TYPES,
    Library,
    Product,
    RefusedError,
    Shape,
    open_library,
)
from engine.kernels.target import kernel_cache

log = logging.getLogger(__name__)

LEAST_ROWS = 65  # up to 64 rows the time is spent on reading weights, and our own tuned kernels are used
# Longer steps can have any number of tokens; they use the fastest algorithm of the nearest timed number.
LONG_ROWS = 2048
LEAST_WEIGHT = 1 << 20  # numbers: smaller products take as long as their launch
COLD = 256 << 20  # bytes of weights to cycle through, so that none is in the device's cache
ENOUGH = 50e-6  # seconds of one timing; small products are launched several times
HOST = 40e-6  # seconds per launch that the device sleeps first, so that it never waits for the host
ROUNDS = 5  # interleaved timings of the algorithms that are within CLOSE of the fastest in the first round
CLOSE = 1.1
GAIN = 0.98  # an algorithm is chosen only if it takes less than this share of torch's time
# Products with more arithmetic are limited by the card's power in a busy server, where a small gain may be a loss.
POWER_FLOPS, POWER_GAIN = 3e10, 0.93
TORCHS = b""  # torch's choice
FLOPS, BYTES = 6e14, 2.5e12  # per second of a large card; used to choose the number of launches
FILE = "products.json"
MAX_READY = 4096  # most prepared products, over all numbers of rows

Run = Callable[[Tensor], object]  # one launch, with that weight


class Kind(NamedTuple):
    """Products with the same shape of weight and any number of rows."""

    width: int
    depth: int
    added: bool  # the result is added to a tensor
    gated: bool  # gate and up: our kernels take some numbers of rows; the library needs a separate activation
    dtype: torch.dtype

    def shape(self, rows: int) -> Shape:
        return Shape(rows, self.width, self.depth, self.added, self.dtype)


Products = dict[Kind, list[Tensor]]  # kind -> weights


class Algorithms:
    """The choices of one accelerator."""

    def __init__(self, chosen: dict[Kind, dict[int, bytes]] | None = None) -> None:
        """`chosen`: the choices of other accelerators, which this one shares and adds to."""
        self.library: Library | None = None
        self.chosen = {} if chosen is None else chosen  # by rows; TORCHS: torch's choice
        self._ready: dict[tuple[Kind, int], Product | None] = {}  # (kind, rows) -> product; None: torch's choice
        self.recorded: Products = {}
        self._records = False

    @contextmanager
    def recording(self) -> Iterator[Products]:
        """A context that records the weights of the products launched inside, for `autotune`; gives all recorded."""
        self._records = True
        try:
            yield self.recorded
        finally:
            self._records = False

    def record(self, weight: Tensor, added: bool, gated: bool) -> None:
        """Inside `recording`, records a product with `weight` [width, depth]."""
        if not self._records or weight.dtype not in TYPES or weight.numel() < LEAST_WEIGHT:
            return
        known = self.recorded.setdefault(_kind(weight, added, gated), [])
        if all(other is not weight for other in known):
            known.append(weight)

    def run_chosen(self, x: Tensor, weight: Tensor, gated: bool, added: Tensor | None, out: Tensor) -> bool:
        """Launches out [M, N] = x [M, K] weight^T (+ added) with the fastest algorithm; False: torch must multiply."""
        if not self.chosen:
            return False
        kind, rows = _kind(weight, added is not None, gated), len(x)
        product = self.product(kind, rows)
        if product is None or not all(map(_as_wanted, (x, weight, out) if added is None else (x, weight, out, added))):
            return False
        try:
            product(x, weight, added, out)
        except RefusedError as error:  # for an untimed number of rows; nothing was launched
            log.warning("products: %d rows of %s (%s): torch chooses from now on", rows, _name(kind), error)
            self._ready[kind, rows] = None
            return False
        return True

    def product(self, kind: Kind, rows: int) -> Product | None:
        if (kind, rows) in self._ready:
            return self._ready[kind, rows]
        timed = self.chosen.get(kind, {})
        known = rows if rows in timed or rows <= LONG_ROWS else _nearest(rows, timed)
        algorithm = timed.get(known, TORCHS)
        found = self.library.product(kind.shape(rows), algorithm) if algorithm and self.library is not None else None
        if len(self._ready) >= MAX_READY:
            self._ready.clear()
        self._ready[kind, rows] = found
        return found

    def autotune(self, products: Products, sizes: Callable[[Kind], list[int]]) -> None:
        """Finds the algorithms of these products for the numbers of rows from `sizes`, each at least LEAST_ROWS.

        Kinds that another accelerator has timed are not timed again. The products of long steps are launched in any
        case, so that no later step has to load a kernel.
        """
        try:
            self.library = self.library or open_library()
        except (OSError, AttributeError, RefusedError) as error:
            if self.chosen:  # another accelerator multiplies by its choices
                raise
            log.warning("products: cublasLt cannot be used (%s): torch chooses its algorithms", error)
        if self.library is None or not products:
            return
        saved = Saved(self.library.version, torch.cuda.get_device_name())
        begun, fresh = time.perf_counter(), 0
        for kind, known in products.items():
            wanted = [rows for rows in sizes(kind) if rows >= LEAST_ROWS]
            if kind not in self.chosen:
                fresh += self._choose(self.library, kind, known, wanted, saved)
            self._ready.clear()
            self._launch_long(kind, known[0], wanted)
        if fresh:
            saved.write(self.chosen)
            log.info("products: timed the algorithms of %d shapes in %.1f s", fresh, time.perf_counter() - begun)

    def _choose(self, library: Library, kind: Kind, known: list[Tensor], wanted: list[int], saved: Saved) -> int:
        """Reads or times the choices for these numbers of rows; returns how many were timed."""
        timed = self.chosen[kind] = {rows: found for rows, found in saved.of(kind).items() if rows in wanted}
        missing = [rows for rows in wanted if rows not in timed]
        try:
            timed.update(_time(library, kind, known, missing))
        except (torch.OutOfMemoryError, RefusedError) as error:  # the memory profile will report missing memory
            log.warning("products: %s cannot be timed (%s): torch chooses its algorithms", _name(kind), error)
            return 0
        return len(missing)

    def _launch_long(self, kind: Kind, weight: Tensor, sizes: list[int]) -> None:
        for rows in sizes:
            if rows > LONG_ROWS and self.product(kind, rows) is not None:
                x, out = weight.new_zeros(rows, kind.depth), weight.new_zeros(rows, kind.width)
                self.run_chosen(x, weight, kind.gated, out if kind.added else None, out)


def _kind(weight: Tensor, added: bool, gated: bool) -> Kind:
    width, depth = weight.shape
    return Kind(width, depth, added, gated, weight.dtype)


def _as_wanted(operand: Tensor) -> bool:
    return operand.is_contiguous() and operand.data_ptr() % ALIGNMENT == 0


def _nearest(rows: int, timed: dict[int, bytes]) -> int:
    return min((size for size in timed if size > LONG_ROWS), key=lambda size: abs(math.log(size / rows)), default=0)


def _time(library: Library, kind: Kind, weights: list[Tensor], sizes: list[int]) -> dict[int, bytes]:
    """The fastest algorithm by rows."""
    if not sizes:
        return {}
    weights = list(weights)
    while sum(one.nbytes for one in weights) < COLD:
        weights.append(weights[0].clone())
    x = torch.randn(max(sizes), kind.depth, dtype=kind.dtype, device=weights[0].device)
    out = torch.zeros(max(sizes), kind.width, dtype=kind.dtype, device=weights[0].device)
    return {rows: _fastest(library, kind.shape(rows), weights, x[:rows], out[:rows]) for rows in sizes}


def _fastest(library: Library, shape: Shape, weights: list[Tensor], x: Tensor, out: Tensor) -> bytes:
    """The algorithm that won by enough, or TORCHS."""
    added = out if shape.added else None

    def by_torch(weight: Tensor) -> object:
        return torch.mm(x, weight.t(), out=out) if added is None else torch.addmm(added, x, weight.t(), out=out)

    runs: dict[bytes, Run] = {TORCHS: by_torch}
    for algorithm in library.algorithms(shape):
        product = library.product(shape, algorithm)
        if product is not None:
            runs[algorithm] = functools.partial(_launch, product, x, added, out)
    for algorithm, run in list(runs.items()):  # a kernel is loaded when it is first launched
        try:
            run(weights[0])
        except RefusedError:  # some algorithms fail only at launch
            del runs[algorithm]
    flops = 2 * shape.rows * shape.width * shape.depth
    times = math.ceil(ENOUGH / max(flops / FLOPS, 2 * shape.width * shape.depth / BYTES))
    gain = GAIN if flops < POWER_FLOPS else POWER_GAIN
    return quickest(runs, lambda rivals: seconds(rivals, weights, times), gain)


def _launch(product: Product, x: Tensor, added: Tensor | None, out: Tensor, weight: Tensor) -> None:
    product(x, weight, added, out)


def quickest(runs: dict[bytes, Run], timed: Callable[[list[Run]], list[float]], gain: float) -> bytes:
    """The algorithm of the fastest run if it takes less than `gain` of torch's time; else TORCHS."""
    first = dict(zip(runs, timed(list(runs.values())), strict=True))
    limit = CLOSE * min(first.values())
    rivals = [algorithm for algorithm in runs if algorithm == TORCHS or first[algorithm] <= limit]
    rounds = [timed([runs[algorithm] for algorithm in rivals]) for _ in range(ROUNDS)]
    took = {rival: statistics.median(times) for rival, times in zip(rivals, zip(*rounds, strict=True), strict=True)}
    winner = min(rivals, key=took.__getitem__)
    return winner if took[winner] < gain * took[TORCHS] else TORCHS


def seconds(runs: list[Run], weights: list[Tensor], times: int, host: float = HOST) -> list[float]:
    """The device's seconds per call of each run: the mean of `times` calls in a row, which cycle through the weights.

    `host`: seconds that the host takes to launch one call.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    torch.cuda._sleep(int(host * times * len(runs) * 1.5e9))  # cycles
    number = 0
    marks[0].record()
    for mark, run in zip(marks[1:], runs, strict=True):
        for _ in range(times):
            run(weights[number % len(weights)])
            number += 1
        mark.record()
    marks[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 / times for before, after in itertools.pairwise(marks)]


class Saved:
    """The choices of earlier starts, in a file of Triton's cache, which is read once and written completely."""

    def __init__(self, version: int, card: str) -> None:
        key = hashlib.sha256(f"omniloop, products of cublasLt {version} on {card}".encode()).hexdigest()
        self.place = kernel_cache(key)
        self._found: dict[str, dict[int, bytes]] = {}
        path = self.place.get_file(FILE)
        if path is not None:
            try:
                with open(path, encoding="utf-8") as file:
                    self._found = {name: _parsed(timed) for name, timed in json.load(file).items()}
            except (OSError, ValueError, AttributeError, TypeError) as error:
                log.warning("products: %s cannot be read (%s): they are timed again", path, error)

    def of(self, kind: Kind) -> dict[int, bytes]:
        return dict(self._found.get(_name(kind), {}))

    def write(self, found: dict[Kind, dict[int, bytes]]) -> None:
        """Adds to the saved choices."""
        for kind, timed in found.items():
            self._found.setdefault(_name(kind), {}).update(timed)
        text = json.dumps({
            name: {str(rows): algorithm.hex() for rows, algorithm in timed.items()}
            for name, timed in self._found.items()
        })  # fmt: skip
        try:
            self.place.put(text, FILE, binary=False)
        except OSError as error:
            log.warning("products: their algorithms cannot be kept (%s): the next start times them again", error)


def _parsed(timed: dict[str, str]) -> dict[int, bytes]:
    parsed = {int(rows): bytes.fromhex(algorithm) for rows, algorithm in timed.items()}
    if any(len(algorithm) not in (0, ALGORITHM_BYTES) for algorithm in parsed.values()):
        raise ValueError(f"an algorithm has other than {ALGORITHM_BYTES} bytes")
    return parsed


def _name(kind: Kind) -> str:
    ways = [way for way, so in (("added", kind.added), ("gated", kind.gated)) if so]
    return " ".join([str(kind.width), str(kind.depth), str(kind.dtype).removeprefix("torch."), *ways])
