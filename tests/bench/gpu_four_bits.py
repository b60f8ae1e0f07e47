"""Products of many rows by INT4 weights in groups of 128, for gpu_kernels: the 8B's four, compared with bfloat16.

gate|up includes its activation. "values" is gemm/scaled_values, "sums" gemm/groups, "bf16" the library's product.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from engine.kernels.activation import Activation, glu
from engine.kernels.gemm.codes import Codes, Kind
from engine.kernels.gemm.dispatch_codes import gated_by_tiles, linear_by_tiles
from engine.kernels.gemm.groups import Packed, packed
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.room import empty_rows
from tests.bench.gpu_one_row import PRODUCTS

TimeOf = Callable[[list[Callable[[], object]]], tuple[float, float, float]]
ROWS = (4, 16, 32, 64, 96, 128, 192, 256, 384, 512)
CACHE = 120 << 20  # bytes, more than any cache holds


def weight(width: int, depth: int) -> Packed:
    values = torch.randint(0, 16, (width, depth), device="cuda", dtype=torch.uint8)
    return packed(Codes(Kind.INT4, values, (torch.rand(width, depth // 128, device="cuda") * 0.01).bfloat16(), 128))


def product_cases(time_of: TimeOf, name: str) -> list[dict]:
    (width, depth), gated = PRODUCTS[name], name == "gate|up"
    weights = [weight(width, depth) for _ in range(max(2, 2 * CACHE // (width * depth)))]
    wide = [torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    arrivals(weights[0].codes.device)
    found = []
    for rows in ROWS:
        x = empty_rows(torch.empty(rows, 1, device="cuda", dtype=torch.bfloat16), depth).normal_()

        def by_codes(one: Packed, x: torch.Tensor = x) -> torch.Tensor:
            if gated:
                return gated_by_tiles(x, one, None, Activation.SILU)
            out = x.new_empty(len(x), width)
            linear_by_tiles(x, one, None, None, out)
            return out

        def by_library(one: torch.Tensor, x: torch.Tensor = x) -> torch.Tensor:
            out = torch.mm(x, one.t())
            return glu(out, Activation.SILU) if gated else out

        case = {"bytes": sum(held.nbytes for held in weights[0].tensors()), "flops": 2 * rows * width * depth}
        with mock.patch("engine.kernels.gemm.dispatch_codes.takes_values", return_value=False):
            want = by_codes(weights[0]).float()
            took = time_of([lambda one=one: by_codes(one) for one in weights])
        found.append(case | {"name": f"int4 {name} {rows} sums", "times": took})
        error = float((by_codes(weights[0]).float() - want).norm() / want.norm())
        said = "values" if error < 1e-2 else f"values: OFF BY {error:.1e}"
        took = time_of([lambda one=one: by_codes(one) for one in weights])
        found.append(case | {"name": f"int4 {name} {rows} {said}", "times": took})
        took = time_of([lambda one=one: by_library(one) for one in wide])
        found.append(case | {"name": f"int4 {name} {rows} bf16", "bytes": wide[0].nbytes, "times": took})
    return found


def four_bit_cases(time_of: TimeOf) -> list[Callable[[], list[dict]]]:
    """One group of cases per product."""
    return [lambda name=name: product_cases(time_of, name) for name in PRODUCTS]
