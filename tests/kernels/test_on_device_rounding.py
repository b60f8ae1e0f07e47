"""Products with quantised weights on a real GPU round once: relative norms against float64 of the same codes.

Rounding the result to bfloat16 alone gives an error of 1.66e-3 of a random product's norm. The bound is 2e-3, and 4e-3
for FP8 products of 12,288 columns, which Hopper's units add in 14 bits. Quantised inputs are quantised in the reference
too. QUANTIZATION.md section 4 rounds a 4-bit or 8-bit value once to the inputs' dtype before the product. Kernels whose
scales multiply sums do not round the value, so either weight may be the right one. Both errors are printed.
test_on_device_quantised has bounds of 3e-3 and 4e-3 for products with a residual, which the library rounds twice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.float8_weight import pack_float8
from engine.kernels.gemm.group_weight import pack_groups
from engine.kernels.gemm.long_products import LongProducts
from engine.kernels.gemm.quantise_floats import quantise_floats
from engine.kernels.gemm.quantise_rows import quantise_rows
from engine.kernels.gemm.scaled import ScaledProducts
from engine.kernels.gemm.weight import Weight
from engine.kernels.target import target
from tests.kernels.test_group_panels import codes_of
from tests.kernels.test_on_device_quantised import FLOATS, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
LIMIT, LONG_SUMS = 2e-3, 4e-3
ROWS = (1, 2, 16, 17, 64, 200, 512, 2048)
SHAPES = {"q|k|v": (6144, 4096), "down": (4096, 12288)}  # sizes of an 8B


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check(name: str, weight: Weight, x: Tensor, wants: dict[str, Tensor], limit: float = LIMIT) -> None:
    """Checks the products; `wants`: acceptable float64 results."""
    for rows in ROWS:
        errors = {kind: relative(weight.linear(x[:rows]), want[:rows]) for kind, want in wants.items()}
        print(f"{name}, {rows} rows: " + ", ".join(f"{kind} {error:.2e}" for kind, error in errors.items()))
        assert min(errors.values()) <= limit, f"{name}, {rows} rows: {errors}"


def drawn(depth: int) -> Tensor:
    return torch.randn(max(ROWS), depth, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(("kind", "group", "shape"), [
    (Kind.INT4, 128, "q|k|v"), (Kind.INT4, 128, "down"), (Kind.INT8, 4096, "q|k|v"), (Kind.E2M1, 16, "q|k|v"),
    (Kind.E2M1, 32, "q|k|v"), (Kind.E4M3, 4096, "q|k|v"),
])  # fmt: skip
def test_inputs_that_stay_floats(kind, group, shape):
    """The kernels that a start chooses before timings, and those chosen after timings."""
    (width, depth), x = SHAPES[shape], drawn(SHAPES[shape][1])
    codes = on_device(codes_of(kind, width, depth, group))
    weight, dense = pack_groups(codes, None, long := LongProducts(), invariant=False), codes.dense().double()
    exact = pack_groups(codes, None, LongProducts(), invariant=True)
    named = f"{kind.name} by {group}, {shape}"
    wants = {"exact": x.double() @ dense.T, "rounded": x.double() @ dense.to(x.dtype).double().T}
    check(named, weight, x, wants)
    long.autotune([2048], torch.bfloat16)
    check(f"{named}, timed", weight, x, wants)
    check(f"{named}, deterministic", exact, x, wants)


def test_inputs_that_become_integers():
    (width, depth), x = SHAPES["q|k|v"], drawn(SHAPES["q|k|v"][1])
    codes = replace(on_device(codes_of(Kind.INT8, width, depth, depth)), inputs=Inputs())
    whole, scales = quantise_rows(x, None)
    wants = {"exact": (whole.double() * scales.double()[:, None]) @ codes.dense().double().T}
    for invariant in (False, True):
        weight = pack_groups(codes, None, LongProducts(), invariant)
        check("INT8 by INT8" + ", deterministic" * invariant, weight, x, wants)


@pytest.mark.skipif(not target().multiplies_float8, reason="no units for FP8")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", FLOATS)
def test_inputs_that_become_codes(how, shape):
    (width, depth), inputs, x = SHAPES[shape], FLOATS[how], drawn(SHAPES[shape][1])
    limit = LONG_SUMS if depth == 12288 else LIMIT
    weight, exact, dense, products = float8_weights(width, depth, inputs)
    codes, scales = quantise_floats(x, inputs)
    wide = scales.double().T.repeat_interleave(depth // len(scales), 1)
    wants = {"exact": (codes.view(torch.float8_e4m3fn).double() * wide) @ dense.T}
    named = f"FP8 by {how}, {shape}"
    check(named, weight, x, wants, limit)
    products.autotune(ROWS, torch.bfloat16)
    print([rows for rows in ROWS if products.is_librarys(rows, width, depth)], "rows are the library's")
    check(f"{named}, timed", weight, x, wants, limit)
    check(f"{named}, deterministic", exact, x, wants, limit)


def float8_weights(width: int, depth: int, inputs: Inputs) -> tuple[Weight, Weight, Tensor, ScaledProducts]:
    """A weight, the same weight for --deterministic, its values, and the choices that the first weight uses."""
    group, products = inputs.group or depth, ScaledProducts()
    made = on_device(codes_of(Kind.E4M3, width, depth, group))
    scale = made.scale.float()
    if inputs.group:
        scale = scale[::128].repeat_interleave(128, 0)
    codes = Codes(Kind.E4M3, made.values, scale, group, inputs=inputs)
    weights = [pack_float8(codes, None, torch.bfloat16, products, invariant) for invariant in (False, True)]
    return weights[0], weights[1], codes.dense().double(), products
