"""Prompts by 4-bit weights with and without zero points: the 8B's four products, microseconds, and their sum by layer.

Forms: "symmetric" and "zeros", each with scales in bfloat16 and in float16 (AWQ's files). Algorithms: "tiles" widens in
registers (gemm/scaled_values), "whole" widens the weight first (gemm/widen_weight) and multiplies as with floats;
"widen" is the first half of that. The last lines are the times of all layers with the faster algorithm of each product,
and their ratio to the symmetric form with the same scales. Gate|up includes its activation. With --baseline the same
measurement runs in another checkout on the same card, before and after this one. Results are written into --out. Run:
python -m tests.bench.gpu_zero_points [--rows 256,512,1024,8192] [--baseline CHECKOUT] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.codes import Codes, Kind
from engine.kernels.gemm.dispatch_codes import gated_by_tiles, linear_by_tiles
from engine.kernels.gemm.groups import Packed, packed
from engine.kernels.gemm.long_products import LongProducts
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.widen_weight import widen_weight
from engine.kernels.room import empty_rows
from tests.bench.gpu_one_row import PRODUCTS

LAYERS, GROUP, ROUNDS, LEAST_S = 36, 128, 5, 0.01
WIDENING = LongProducts()
FORMS = {
    "symmetric bf16": (torch.bfloat16, False),
    "zeros bf16": (torch.bfloat16, True),
    "symmetric f16": (torch.float16, False),
    "zeros f16": (torch.float16, True),
}
LIMIT = 1e-2  # largest relative difference from products of float32


def weight(width: int, depth: int, scales: torch.dtype, zeros: bool) -> Packed:
    """Random codes; float16's scales arrive as float32, as the dialects of quant give them."""
    values = torch.randint(0, 16, (width, depth), device="cuda", dtype=torch.uint8)
    shape = (width, depth // GROUP)
    scale = (torch.rand(shape, device="cuda") * 0.01 + 1e-3).to(scales)
    zero = torch.randint(-8, 8, shape, device="cuda", dtype=torch.int8) if zeros else None
    return packed(Codes(Kind.INT4, values, scale.float() if scales is torch.float16 else scale, GROUP, zero=zero))


def timed(calls: list[Callable[[], object]]) -> float:
    """Median seconds of a call over ROUNDS rounds; each round takes some LEAST_S seconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for call in calls:
        call()
    seconds, count = [], len(calls)
    for number in range(ROUNDS + 1):
        start.record()
        for turn in range(count):
            calls[turn % len(calls)]()
        end.record()
        end.synchronize()
        took = start.elapsed_time(end) / 1e3 / count
        if number:
            seconds.append(took)
        count = min(2000, max(len(calls), int(LEAST_S / took)))
    return statistics.median(seconds)


class Shape(NamedTuple):
    """A product of the layer."""

    width: int
    depth: int
    gated: bool


def by_tiles(shape: Shape, x: torch.Tensor, one: Packed) -> torch.Tensor:
    if shape.gated:
        return gated_by_tiles(x, one, None, Activation.SILU)
    out = x.new_empty(len(x), shape.width)
    linear_by_tiles(x, one, None, None, out)
    return out


def whole(shape: Shape, x: torch.Tensor, one: Packed) -> torch.Tensor:
    wide = WIDENING.widened(one, None, x.dtype)
    return wide.gated(x, Activation.SILU) if shape.gated else wide.linear(x)


def by_floats(shape: Shape, x: torch.Tensor, one: Packed) -> torch.Tensor:
    made = torch.nn.functional.linear(x.float(), one.dense().float())
    return glu(made, Activation.SILU) if shape.gated else made


def product_cases(name: str, rows: list[int]) -> dict[str, dict[str, float]]:
    """Rows -> "form, algorithm" -> microseconds."""
    width, depth = PRODUCTS[name]
    shape = Shape(width, depth, name == "gate|up")
    copies = max(2, (240 << 20) // (shape.width * shape.depth))
    found: dict[str, dict[str, float]] = {f"{name} {count}": {} for count in ("any", *rows)}
    x = empty_rows(torch.empty(max(rows), 1, device="cuda", dtype=torch.bfloat16), shape.depth).normal_()
    for form, kind in FORMS.items():
        weights = [weight(shape.width, shape.depth, *kind) for _ in range(copies)]
        arrivals(weights[0].codes.device)
        took = timed([partial(widen_weight, one, torch.bfloat16) for one in weights])
        found[f"{name} any"][f"{form}, widen"] = 1e6 * took
        right = by_floats(shape, x[:16], weights[0])
        for count in rows:
            for said, run in (("tiles", by_tiles), ("whole", whole)):
                error = float((run(shape, x[:count], weights[0])[:16].float() - right).norm() / right.norm())
                if not error < LIMIT:
                    print(f"{name} {count} {form} {said}: OFF BY {error:.1e}", file=sys.stderr)
                took = timed([partial(run, shape, x[:count], one) for one in weights])
                found[f"{name} {count}"][f"{form}, {said}"] = 1e6 * took
    return found


def cases(rows: list[int]) -> dict[str, dict[str, float]]:
    """Product and rows -> "form, algorithm" -> microseconds."""
    return {case: times for name in PRODUCTS for case, times in product_cases(name, rows).items()}


def of_layers(found: dict[str, dict[str, float]], rows: int, form: str) -> float:
    """Milliseconds of the products of all layers, with the faster algorithm of each."""
    best = (min(found[f"{name} {rows}"][f"{form}, {said}"] for said in ("tiles", "whole")) for name in PRODUCTS)
    return LAYERS * sum(best) / 1e3


def report(found: dict[str, dict[str, float]], rows: list[int]) -> None:
    for case, times in found.items():
        print(f"{case:<16}" + "  ".join(f"{name} {took:.1f}" for name, took in times.items()), flush=True)
    for count in rows:
        times = {form: of_layers(found, count, form) for form in FORMS}
        said = "  ".join(f"{form} {took:.2f} ms" for form, took in times.items())
        ratios = ", ".join(
            f"{kind} {times[f'zeros {kind}'] / times[f'symmetric {kind}']:.3f}" for kind in ("bf16", "f16")
        )
        print(f"all layers, {count} rows: {said}; zeros / symmetric: {ratios}", flush=True)


def run_in(checkout: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measures with the modules of `checkout`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", "--rows", args.rows]
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=environment, check=False)
    print(done.stderr[-2000:], file=sys.stderr)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="256,512,1024,8192")
    parser.add_argument("--baseline", type=Path, help="another checkout, its extensions built")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = [int(word) for word in args.rows.split(",")]
    if args.inside:
        print(json.dumps(cases(rows)))
        return
    print(torch.cuda.get_device_name())
    runs = {}
    for name, checkout in (("before", args.baseline), ("after", Path.cwd())):
        if checkout is not None:
            runs[name] = run_in(checkout, args)
            print(f"{name}: {checkout}")
            report(runs[name], rows)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gpu_zero_points.json").write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
