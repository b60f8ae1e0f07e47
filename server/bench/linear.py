"""bench linear: times one product by form of weight and rows, against floats and the machine's rates.

Owner: main thread. Each form is packed as a layer packs it, and calls alternate between copies of the weight, so that
no cache holds it. `_fraction` is the rate at which a form's bytes are read, divided by a copy's rate. `_gain` is the
time of the product of floats, divided by the form's time. Floats are bfloat16; on a CPU float32 is measured too. On an
accelerator, FP8 products and fully dequantised weights are tuned first, as at the server's start (kernels/gemm/scaled
and long_products); torch chooses the kernels of bfloat16 products.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.pack import Placement, pack, pack_pieces
from engine.kernels.gemm.weight import Weight
from server.bench.options import LinearOptions
from server.bench.output import finish
from server.bench.timing import COLD, chosen_device, rates, time_of

MOST_COPIES = 64
# Form -> kind of codes, columns that share a scale (0: all), whether it has zero points, how inputs are quantised.
CODES: dict[str, tuple[Kind, int, bool, Inputs | None]] = {
    "int4_128": (Kind.INT4, 128, False, None),
    "int4_128_zeros": (Kind.INT4, 128, True, None),
    "e2m1_16": (Kind.E2M1, 16, False, None),
    "mxfp4": (Kind.E2M1, 32, False, None),
    "int8": (Kind.INT8, 0, False, None),
    "int8_inputs": (Kind.INT8, 0, False, Inputs()),
    "fp8": (Kind.E4M3, 0, False, None),
    "fp8_inputs": (Kind.E4M3, 0, False, Inputs(kind=Kind.E4M3)),
    "fp8_blocks": (Kind.E4M3, 128, False, None),
    "fp8_blocks_inputs": (Kind.E4M3, 128, False, Inputs(kind=Kind.E4M3, group=128)),
}


def run(options: LinearOptions) -> int:
    """The command's exit status."""
    try:
        device = chosen_device(options.device)
    except ValueError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 2
    with torch.inference_mode():
        return finish(options, measure(options, device))


def measure(options: LinearOptions, device: str) -> dict[str, float]:
    """Microseconds, fractions and gains by form and rows."""
    copied, _ = rates(device, torch.bfloat16)
    found = {"copy_gigabytes_per_s": copied / 1e9}
    placement = Placement(torch.bfloat16, device)
    for name, make in forms(options, device).items():
        first = make(placement)
        count = min(MOST_COPIES, math.ceil(COLD / first.num_bytes))
        weights = [first, *(another(first) for _ in range(count - 1))]
        if device == "cuda":
            first.linear(torch.randn(max(options.rows), options.depth, device=device, dtype=torch.bfloat16))
            placement.products.scaled.autotune(options.rows, torch.bfloat16)
            placement.products.long.autotune(options.rows, torch.bfloat16)
        for rows in options.rows:
            x = torch.randn(rows, options.depth, device=device).to(
                torch.float32 if name == "float32" else torch.bfloat16
            )
            out = x.new_empty(rows, options.width)
            took = time_of([partial(weight.linear, x, out) for weight in weights], device)
            found[f"{rows}_{name}_us"] = took * 1e6
            found[f"{rows}_{name}_fraction"] = first.num_bytes / took / copied
            found[f"{rows}_{name}_gain"] = found[f"{rows}_bfloat16_us"] / (took * 1e6)
        placement = Placement(torch.bfloat16, device)  # tuning choices of one form must not affect the next
    return found


def forms(options: LinearOptions, device: str) -> dict[str, Callable[[Placement], Weight]]:
    """Name -> a function that packs the weight; bfloat16 first."""
    floats = {"bfloat16": torch.bfloat16}
    if device == "cpu":
        floats["float32"] = torch.float32

    def dense(dtype: torch.dtype, placement: Placement) -> Weight:
        return pack(torch.randn(options.width, options.depth, device=device).to(dtype), None, placement)

    def coded(name: str, placement: Placement) -> Weight:
        return pack_pieces([codes_of(name, options.width, options.depth, device)], None, placement, gated=False)

    made = {name: partial(dense, dtype) for name, dtype in floats.items()}
    kinds = [name for name, (_, group, *_) in CODES.items() if options.depth % max(1, group) == 0]
    return {**made, **{name: partial(coded, name) for name in kinds}}


def codes_of(name: str, rows: int, columns: int, device: str) -> Codes:
    """Random quantised weights."""
    kind, group, has_zeros, inputs = CODES[name]
    group = group or columns
    shape = (rows, columns // group)
    most = 16 if kind in (Kind.INT4, Kind.E2M1) else 0x60  # E4M3 codes below 128
    values = torch.randint(0, most, (rows, columns), device=device, dtype=torch.uint8)
    values = values.to(torch.int8) if kind is Kind.INT8 else values
    zero = torch.randint(-8, 8, shape, device=device, dtype=torch.int8) if has_zeros else None
    scale = torch.rand(shape, device=device) * 0.01 + 0.01
    return Codes(kind, values, scale if group == columns else scale.bfloat16(), group, zero=zero, inputs=inputs)


def another(weight: Any) -> Any:
    """The same weight in other memory."""
    held = {field.name: getattr(weight, field.name) for field in fields(weight)}
    copies = {name: each.clone() for name, each in held.items() if isinstance(each, Tensor)}
    copies |= {
        name: another(each) for name, each in held.items() if is_dataclass(each) and not isinstance(each, Inputs)
    }
    return replace(weight, **copies)
