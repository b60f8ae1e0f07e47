"""Tiles of experts' products on this card, timed: the lines of kernels/moe/tiles for Qwen3-30B-A3B and gpt-oss-20b.

For each form, product and class of pairs of an expert: the microseconds of the tile that is taken now, of the fastest
one, and at the end the line to commit. Pairs are spread evenly over experts; the class without a sort has one row, the
last one four times the pairs of the class before it. Graphs of 20 calls over two weights, which no cache holds. Kernels
are compiled side by side before; about a minute on 16 cores.
Run: python -m tests.bench.gpu_moe_tiles [--only "bfloat16,E4M3 by 128,MXFP4"].
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import groupby
from itertools import product as combinations

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.compile_ahead import compile_ahead
from engine.kernels.gemm.code_sums import block_k_of
from engine.kernels.gemm.codes import Codes, Kind
from engine.kernels.gemm.groups import KINDS, Packed, packed
from engine.kernels.moe.coded import coded_product
from engine.kernels.moe.grouped import Tile, launch_grouped
from engine.kernels.moe.sort import Pairs, sort_pairs
from engine.kernels.moe.tiles import CLASSES, LINES, Shape
from engine.kernels.target import Target, target
from server.bench.timing import recorded_calls

DEVICE, REPLAYS = "cuda", 5
FORMS = {  # form -> its products, and the experts of a token
    "bfloat16": ((Shape(128, 768, 2048, gated=True), Shape(128, 2048, 768, gated=False)), 8),
    "E4M3 by 128": ((Shape(128, 768, 2048, gated=True), Shape(128, 2048, 768, gated=False)), 8),
    "MXFP4": ((Shape(32, 2880, 2880, gated=True), Shape(32, 2880, 2880, gated=False)), 4),
}
Call = Callable[[], object]
TimeOf = Callable[[Sequence[Call]], float]


def candidates(device: Target, form: str, shape: Shape, each: float) -> list[Tile]:
    """Tiles worth a try for so many pairs of an expert."""
    pairs_of_tile = [8, 16] if each <= 16 else [16, 32, 64] if each <= 48 else [64, 128]
    found = []
    for block_m in pairs_of_tile:
        for block_n in (32, 64, 128):
            for stages in ((3, 4) if form == "bfloat16" else (3,)) if device.loads_past_registers else (2,):
                block_k = {"bfloat16": 64 if block_m > 32 else 128, "MXFP4": 64}.get(form, 0)
                block_k = block_k or block_k_of(KINDS[Kind.E4M3], 128, 2)
                rows = block_n * (2 if shape.gated else 1)
                if (block_m < 16 and form != "MXFP4") or (stages == 4 and block_m * rows > 8192):
                    continue
                if stages * (block_m + rows) * block_k * 2 > device.shared_memory or block_m * rows > 128 * 256:
                    continue
                found.append(Tile(block_m, block_n, block_k, stages, 8 if block_m * rows >= 128 * 128 else 4))
    if form == "MXFP4" and not each:  # programs may share a tile, and have more on its way
        found = [
            tile._replace(splits=splits, stages=stages, warps=warps)
            for tile, splits, stages, warps in combinations(found, (1, 3, 5, 9), {found[0].stages, 5}, (2, 4))
        ]
    return found


def weights_of(form: str, shape: Shape) -> list[Tensor | Packed]:
    """Two, which take turns."""
    rows = shape.width * (2 if shape.gated else 1)
    if form == "bfloat16":
        return [torch.randn(shape.experts, rows, shape.depth, device=DEVICE).bfloat16() / 45 for _ in range(2)]
    kind, group = (Kind.E2M1, 32) if form == "MXFP4" else (Kind.E4M3, 128)
    high, size = 16 if kind is Kind.E2M1 else 0x50, (shape.experts * rows, shape.depth)
    scale = torch.full((size[0], shape.depth // group), 2.0**-6, device=DEVICE, dtype=torch.bfloat16)
    values = [torch.randint(0, high, size, device=DEVICE, dtype=torch.uint8) for _ in range(2)]
    return [packed(Codes(kind, value, scale, group)) for value in values]


def pairs_for(shape: Shape, top_k: int, each: float) -> Pairs:
    """As many pairs of every expert, one row where they are not sorted."""
    if not each:
        chosen = torch.arange(top_k, device=DEVICE, dtype=torch.int32)[None]
        return Pairs(top_k, chosen, None, None)
    each = 4 * CLASSES[-2] if math.isinf(each) else each
    rows = int(each) * shape.experts // top_k
    order = torch.arange(rows * top_k, device=DEVICE, dtype=torch.int32).view(rows, top_k) % shape.experts
    return sort_pairs(order.contiguous(), shape.experts)


def product(weight: Tensor | Packed, shape: Shape, pairs: Pairs, x: Tensor, tile: Tile) -> Tensor:
    activation = Activation.SILU if shape.gated else None
    if isinstance(weight, Packed):
        return coded_product(x, weight, shape.experts, None, pairs, activation, tile)
    return launch_grouped(x, weight, None, pairs, activation, tile)


def microseconds(calls: Sequence[Call]) -> float:
    for call in calls:
        call()
    once = recorded_calls(calls)
    return statistics.median(once(calls[0]) for _ in range(REPLAYS)) * 1e6


def line_for(form: str, shape: Shape, top_k: int, device: Target, time_of: TimeOf) -> Iterator[tuple[float, Tile]]:
    """By class the fastest tile and its microseconds; tells what is taken now beside it."""
    weights = weights_of(form, shape)
    now = LINES.get(device.arch, {}).get(form, {}).get(shape)
    for number, each in enumerate(CLASSES):
        pairs = pairs_for(shape, top_k, each)
        x = torch.randn(len(pairs.chosen) if shape.gated else pairs.count, shape.depth, device=DEVICE).bfloat16()
        tried = candidates(device, form, shape, each)
        if now is not None and now[number] not in tried:
            tried.append(now[number])
        times = {}
        for tile in tried:
            times[tile] = time_of([partial(product, weight, shape, pairs, x, tile) for weight in weights])
        best = min(times, key=times.__getitem__)
        taken = "" if now is None else f"; now {tuple(now[number])} {times[now[number]]:.1f} us"
        print(
            f"{form} {shape} up to {each:g} pairs of an expert: {tuple(best)} {times[best]:.1f} us{taken}", flush=True
        )
        yield times[best], best


def show(forms: Sequence[str], device: Target, time_of: TimeOf) -> None:
    """All lines of these forms, as they are committed."""
    for form in forms:
        shapes, top_k = FORMS[form]
        for shape in shapes:
            tiles = [tile for _, tile in line_for(form, shape, top_k, device, time_of)]
            runs = [(len(list(run)), tile) for tile, run in groupby(tiles)]
            print(f"{shape}: _line({', '.join(f'({count}, Tile{tuple(tile)})' for count, tile in runs)}),", flush=True)


def walk(forms: Sequence[str], device: Target) -> None:
    """Every launch once, for the compiler alone."""

    def launched(calls: Sequence[Call]) -> float:
        calls[0]()
        return 0.0

    with redirect_stdout(io.StringIO()):
        show(forms, device, launched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(FORMS))
    forms = parser.parse_args().only.split(",")
    with torch.inference_mode():
        compile_ahead(partial(walk, forms, target()), 8, partial(torch.cuda.set_device, 0))
        show(forms, target(), microseconds)


if __name__ == "__main__":
    main()
