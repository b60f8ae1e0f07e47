"""Times tiles of experts' products on this card: the lines of kernels/moe/tiles for Qwen3-30B-A3B and gpt-oss-20b.

For each form, product and class (average number of pairs per expert): the microseconds of the tile in use, those of the
fastest tile, and at the end the line to commit. A class takes as many random rows as give its average. The class
without a sort has one row; the last class has four times the pairs of the class before. Graphs have 20 calls over two
weights that exceed any cache. Kernels are compiled in parallel first; about a minute on 16 cores.

With --rows only the products of Qwen3-30B-A3B in bfloat16 are timed, for these numbers of rows with random experts:
moe/grouped and tiles of moe/grouped_persistent, each with its share of the card's product rate and its error against
float64. At the end come both products and the sort, as a layer runs them, with the fastest tiles. Run: python -m
tests.bench.gpu_moe_tiles [--only "bfloat16;E4M3 by 128;MXFP4"] [--rows 2048,8192].
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

from engine.kernels.activation import Activation, activate_reference
from engine.kernels.gemm.code_sums import block_k_of
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.groups import KINDS, Packed, packed
from engine.kernels.gemm.quantise_floats import CodedRows, quantise_floats
from engine.kernels.moe.dispatch_codes import Product, coded_product
from engine.kernels.moe.float8 import LEAST, float8_experts_product, pack_float8_experts
from engine.kernels.moe.grouped import Tile, launch_grouped, tile_of
from engine.kernels.moe.grouped_persistent import persistent_product
from engine.kernels.moe.sort import Pairs, sort_pairs
from engine.kernels.moe.tiles import CLASSES, LINES, Shape
from engine.kernels.precompile import precompile
from engine.kernels.target import Target, target
from server.bench.timing import rates, recorded_calls

DEVICE, REPLAYS = "cuda", 5
GROUPS = Inputs(kind=Kind.E4M3, group=128)  # inputs of FP8 experts
FORMS = {  # form -> shapes of its products, and experts per token
    "bfloat16": ((Shape(128, 768, 2048, gated=True), Shape(128, 2048, 768, gated=False)), 8),
    "E4M3 by 128": ((Shape(128, 768, 2048, gated=True), Shape(128, 2048, 768, gated=False)), 8),
    "E4M3 by E4M3": ((Shape(128, 768, 2048, gated=True), Shape(128, 2048, 768, gated=False)), 8),
    "MXFP4": ((Shape(32, 2880, 2880, gated=True), Shape(32, 2880, 2880, gated=False)), 4),
    "INT4 by 128": ((Shape(128, 768, 2048, gated=True), Shape(128, 2048, 768, gated=False)), 8),
}
Call = Callable[[], object]
TimeOf = Callable[[Sequence[Call]], float]


def candidates(device: Target, form: str, shape: Shape, each: float) -> list[Tile]:
    """Tiles to time for `each` pairs per expert."""
    if each and form in ("MXFP4", "INT4 by 128") and device.begins_early:
        return values_candidates(shape, each)
    if form == "E4M3 by E4M3":
        return float8_candidates(device, shape, each)
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
    if form == "bfloat16" and each > 32 and device.begins_early:
        found += persistent_candidates(shape)
    if form == "E4M3 by 128" and each > 32 and device.begins_early:
        found += values_candidates(shape, each)
    if form == "MXFP4" and not each:  # programs may share a tile and prefetch more
        found = [
            tile._replace(splits=splits, stages=stages, warps=warps)
            for tile, splits, stages, warps in combinations(found, (1, 3, 5, 9), {found[0].stages, 5}, (2, 4))
        ]
    return found


def persistent_candidates(shape: Shape) -> list[Tile]:
    """Tiles of moe/grouped_persistent: pairs, columns per instruction, and so on."""
    cuts = [(128, 256, 4, 8), (128, 256, 3, 8), (64, 256, 4, 4), (64, 256, 2, 4), (128, 128, 4, 8), (128, 128, 3, 4),
            (64, 128, 4, 4)]  # fmt: skip
    return [
        Tile(block_m, columns // 2 if shape.gated else columns, 64, stages, warps, persistent=True)
        for block_m, columns, stages, warps in cuts
    ]


def values_candidates(shape: Shape, each: float) -> list[Tile]:
    """Tiles of moe/values: 64 to 256 rows of the matrix, four warps per 128 rows."""
    least = next((size for size in (16, 32, 64) if each <= size), 128)
    found = []
    for block_m in (least, 2 * least if least < 128 else 64):
        for rows in (128, 256) if shape.gated else (64, 128, 256):
            for block_k, stages in ((64, 3), (64, 5), (128, 2), (128, 3), (128, 4)):
                if rows == 256 and (block_m < 64 or stages in (2, 5)):
                    continue
                block_n = rows // 2 if shape.gated else rows
                found.append(Tile(block_m, block_n, block_k, stages, 8 if rows == 256 else 4, values=True))
    return found


def float8_candidates(device: Target, shape: Shape, each: float) -> list[Tile]:
    """Tiles of moe/float8; with an activation they are as wide as the groups of the next inputs' scales."""
    least = next((size for size in (16, 32, 64) if each <= size), 128)
    sizes = {least, 2 * least if least < 128 else 64, max(least // 2, 16)}
    found = []
    for block_m, block_n in combinations(sorted(sizes), (128,) if shape.gated else (64, 128)):
        for stages, warps in combinations((2, 3, 4, 5), (4, 8)):
            held = 3 * block_m * block_n / (32 * warps)  # registers: two sums, and the product to add
            room = stages * (block_m + 2 * block_n) * 128 < device.shared_memory
            if room and held <= 192 and (warps == 4 or block_m >= 64):
                tile = Tile(block_m, block_n, 128, stages, warps)
                found += [tile, tile._replace(least=LEAST)] if shape.gated and block_m > LEAST else [tile]
    return found


def weights_of(form: str, shape: Shape) -> list[Tensor | Packed]:
    """Two weights, used alternately."""
    rows = shape.width * (2 if shape.gated else 1)
    if form == "bfloat16":
        return [torch.randn(shape.experts, rows, shape.depth, device=DEVICE).bfloat16() / 45 for _ in range(2)]
    kind, group = {"MXFP4": (Kind.E2M1, 32), "INT4 by 128": (Kind.INT4, 128)}.get(form, (Kind.E4M3, 128))
    high, size = 0x50 if kind is Kind.E4M3 else 16, (shape.experts * rows, shape.depth)
    dtype = torch.float32 if kind is Kind.E4M3 else torch.bfloat16
    scale = torch.full((size[0], shape.depth // group), 2.0**-6, device=DEVICE, dtype=dtype)
    values = [torch.randint(0, high, size, device=DEVICE, dtype=torch.uint8) for _ in range(2)]
    codes = [Codes(kind, value, scale, group) for value in values]
    if form == "E4M3 by E4M3":
        return [pack_float8_experts(each, shape.width) for each in codes]
    return [packed(each) for each in codes]


def pairs_for(shape: Shape, top_k: int, each: float) -> Pairs:
    """Pairs with `each` per expert on average; for 0 the unsorted pairs of one row."""
    if not each:
        chosen = torch.arange(top_k, device=DEVICE, dtype=torch.int32)[None]
        return Pairs(top_k, chosen, None, None)
    each = 4 * CLASSES[-2] if math.isinf(each) else each
    return drawn_pairs(int(each) * shape.experts // top_k, shape.experts, top_k)


def float8_product(weight: Packed, shape: Shape, pairs: Pairs, x: CodedRows, tile: Tile) -> object:
    """FP8 weights by FP8 inputs; after an activation the output is FP8 too."""
    rest = shape.experts, None, pairs, Activation.SILU if shape.gated else None, tile, torch.bfloat16
    return float8_experts_product(x, weight, *rest, then=GROUPS)


def product(weight: Tensor | Packed, shape: Shape, pairs: Pairs, x: Tensor, tile: Tile) -> Tensor:
    activation = Activation.SILU if shape.gated else None
    if isinstance(weight, Packed):
        return coded_product(Product(x, weight, shape.experts, None, pairs, activation, tile=tile))
    multiply = persistent_product if tile.persistent else launch_grouped
    return multiply(x, weight, None, pairs, activation, tile)


def microseconds(calls: Sequence[Call]) -> float:
    for call in calls:
        call()
    once = recorded_calls(calls)
    return statistics.median(once(calls[0]) for _ in range(REPLAYS)) * 1e6


def line_for(form: str, shape: Shape, top_k: int, device: Target, time_of: TimeOf) -> Iterator[tuple[float, Tile]]:
    """The fastest tile of each class and its microseconds; prints the tile next to the one in use."""
    weights = weights_of(form, shape)
    now = LINES.get(device.arch, {}).get(form, {}).get(shape)
    for number, each in enumerate(CLASSES):
        pairs = pairs_for(shape, top_k, each)
        x = torch.randn(len(pairs.chosen) if shape.gated else pairs.count, shape.depth, device=DEVICE).bfloat16()
        codes = form == "E4M3 by E4M3"
        if codes and pairs.order is None:  # few pairs use another kernel
            pairs = sort_pairs(pairs.chosen, shape.experts)
        multiply: Callable[..., object] = (
            partial(float8_product, x=quantise_floats(x, GROUPS)) if codes else partial(product, x=x)
        )
        tried = candidates(device, form, shape, each)
        if now is not None and now[number] not in tried:
            tried.append(now[number])
        times = {}
        for tile in tried:
            times[tile] = time_of([partial(multiply, weight, shape, pairs, tile=tile) for weight in weights])
        best = min(times, key=times.__getitem__)
        taken = "" if now is None else f"; now {tuple(now[number])} {times[now[number]]:.1f} us"
        print(
            f"{form} {shape} up to {each:g} pairs of an expert: {tuple(best)} {times[best]:.1f} us{taken}", flush=True
        )
        yield times[best], best


def show(forms: Sequence[str], device: Target, time_of: TimeOf) -> None:
    """Prints all lines of these forms, ready to commit."""
    for form in forms:
        shapes, top_k = FORMS[form]
        for shape in shapes:
            tiles = [tile for _, tile in line_for(form, shape, top_k, device, time_of)]
            runs = [(len(list(run)), tile) for tile, run in groupby(tiles)]
            print(f"{shape}: _line({', '.join(f'({count}, Tile{tuple(tile)})' for count, tile in runs)}),", flush=True)


def drawn_pairs(rows: int, experts: int, top_k: int) -> Pairs:
    """Pairs of rows with random experts."""
    chosen = torch.rand(rows, experts, device=DEVICE).topk(top_k, 1).indices
    return sort_pairs(chosen.int().contiguous(), experts)


def error_of(made: Tensor, weight: Tensor | Packed, shape: Shape, pairs: Pairs, x: Tensor) -> float:
    """The relative error of a few pairs against float64."""
    assert isinstance(weight, Tensor)
    assert pairs.order is not None
    norms = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for place in torch.linspace(0, pairs.count - 1, 48).int().tolist():
        pair = int(pairs.order[place])
        row, result = (pair // pairs.top_k, place) if shape.gated else (place, pair)
        want = weight[int(pairs.chosen.flatten()[pair])].double() @ x[row].double()
        want = activate_reference(want, Activation.SILU) if shape.gated else want
        norms += torch.stack([(made[result].double() - want).square().sum(), want.square().sum()])
    return float((norms[0] / norms[1]).sqrt())


def compare(sizes: Sequence[int], device: Target, time_of: TimeOf, rate: float) -> None:
    """Times the old and the new kernel for many pairs. `rate`: operations per second of a product; 0: compile only."""
    shapes, top_k = FORMS["bfloat16"]
    layers = [weights_of("bfloat16", shape) for shape in shapes]
    experts = shapes[0].experts
    for rows in sizes:
        pairs = drawn_pairs(rows, experts, top_k)
        old: list[Tile] = []
        new: list[Tile] = []
        lengths = rows, pairs.count
        inputs = [torch.randn(n, shape.depth, device=DEVICE).bfloat16() for n, shape in zip(lengths, shapes)]

        def share(microseconds: float, *shapes: Shape, pairs: Pairs = pairs) -> str:
            values = sum(shape.width * shape.depth * (2 if shape.gated else 1) for shape in shapes)
            done = 2 * pairs.count * values / (microseconds or math.inf) * 1e6
            return f"{microseconds:.1f} us, {done / 1e12:.0f} TFLOP/s, {done / (rate or math.inf) * 100:.1f} %"

        for shape, weights, x in zip(shapes, layers, inputs):
            times, name = {}, "gate and up" if shape.gated else "down"
            line = LINES.get(device.arch, {}).get("bfloat16", {}).get(shape, ())
            rule = tile_of(device, pairs.count, experts, shape.gated, 2)
            committed = [tile for tile in line if not tile.persistent and tile.block_m == rule.block_m][-1:]
            for tile in dict.fromkeys([rule, *committed, *persistent_candidates(shape)]):
                times[tile] = time_of([partial(product, weight, shape, pairs, x, tile) for weight in weights])
                wrong = ""
                if rate:
                    made = product(weights[0], shape, pairs, x, tile)
                    wrong = f", error {error_of(made, weights[0], shape, pairs, x):.1e}"
                print(f"{rows} rows, {name}: {tuple(tile)} {share(times[tile], shape)}{wrong}", flush=True)
            for kept, persistent in ((old, False), (new, True)):
                kept.append(min((tile for tile in times if tile.persistent == persistent), key=times.__getitem__))
        for name, tiles in (("grouped", old), ("persistent", new)):

            def layer(number: int, pairs: Pairs = pairs, x: Tensor = inputs[0], tiles: list[Tile] = tiles) -> Tensor:
                again = sort_pairs(pairs.chosen, experts)
                made = product(layers[0][number], shapes[0], again, x, tiles[0])
                return product(layers[1][number], shapes[1], again, made, tiles[1])

            took = time_of([partial(layer, number) for number in range(2)])
            print(f"{rows} rows, sort and both, {name}: {share(took, *shapes)}", flush=True)


def launched(calls: Sequence[Call]) -> float:
    """In place of a timer: launches every call once, so that the kernels are compiled."""
    calls[0]()
    return 0.0


def walk(forms: Sequence[str], device: Target) -> None:
    with redirect_stdout(io.StringIO()):
        show(forms, device, launched)


def walk_rows(sizes: Sequence[int], device: Target) -> None:
    with redirect_stdout(io.StringIO()):
        compare(sizes, device, launched, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=";".join(FORMS))
    parser.add_argument("--rows", help="of Qwen3-30B-A3B in bfloat16, both kernels beside each other")
    asked = parser.parse_args()
    on_card = partial(torch.cuda.set_device, 0)
    with torch.inference_mode():
        if asked.rows:
            sizes = [int(size) for size in asked.rows.split(",")]
            precompile(partial(walk_rows, sizes, target()), 8, on_card)
            rate = rates(DEVICE, torch.bfloat16)[1]
            print(f"a product of 8,192 rows and columns: {rate / 1e12:.0f} TFLOP/s", flush=True)
            compare(sizes, target(), microseconds, rate)
            return
        forms = asked.only.split(";")
        precompile(partial(walk, forms, target()), 8, on_card)
        show(forms, target(), microseconds)


if __name__ == "__main__":
    main()
