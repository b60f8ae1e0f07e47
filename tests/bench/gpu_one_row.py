"""Products of one row by quantised weights, for gpu_kernels: the 8B's four products in FP8 and 4 bits.

"served" is the kernel that a layer uses. "units" is the kernel with matrix units, which more rows use. Norms and
activations belong to a case if they belong to the layer's call. So cases with matrix units, and FP8 cases, have several
launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import torch

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.float8_weight import Float8Weight, pack_float8
from engine.kernels.gemm.group_weight import GroupWeight, pack_groups
from engine.kernels.gemm.long_products import LongProducts
from engine.kernels.gemm.scaled import ScaledProducts

TimeOf = Callable[[list[Callable[[], object]]], tuple[float, float, float]]
PRODUCTS = {"q|k|v": (6144, 4096), "o": (4096, 4096), "gate|up": (24576, 4096), "down": (4096, 12288)}
TAKES = {  # form -> function that decides whether one row is multiplied without matrix units
    "int4": "engine.kernels.gemm.dispatch_codes.takes_row",
    "e4m3": "engine.kernels.gemm.dispatch_float8.takes_row",
}
COPIES = 6  # copies of a weight, more than a cache holds


def weight(form: str, width: int, depth: int) -> GroupWeight | Float8Weight:
    if form == "int4":
        values = torch.randint(0, 16, (width, depth), device="cuda", dtype=torch.uint8)
        scale = (torch.rand(width, depth // 128, device="cuda") * 0.01).bfloat16()
        return pack_groups(Codes(Kind.INT4, values, scale, 128), None, LongProducts(), invariant=False)
    values = torch.randint(0, 0x60, (width, depth), device="cuda", dtype=torch.uint8)
    codes = Codes(Kind.E4M3, values, torch.rand(width, 1, device="cuda"), depth, inputs=Inputs(kind=Kind.E4M3))
    return pack_float8(codes, None, torch.bfloat16, ScaledProducts(), invariant=False)


def product_cases(time_of: TimeOf, form: str, name: str) -> list[dict]:
    width, depth = PRODUCTS[name]
    weights = [weight(form, width, depth) for _ in range(COPIES)]
    x, gain = torch.randn(1, depth, device="cuda", dtype=torch.bfloat16), torch.rand(depth, device="cuda")
    stream = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)
    squares = x.float().square().sum() / 256
    before = Unscaled((x * gain).bfloat16(), squares.expand(256, 1).contiguous(), gain, 1e-6)
    behind = torch.rand(width, device="cuda")

    def call(one: GroupWeight | Float8Weight) -> torch.Tensor:
        if name in ("o", "down"):
            one.add_then_norm(stream, x, behind, 1e-6)
            return stream
        return one.of_normed(x, gain, 1e-6, before, Activation.SILU if name == "gate|up" else None)

    def result(one: GroupWeight | Float8Weight) -> torch.Tensor:
        stream.fill_(1.0)
        return call(one).float()

    found = []
    for way in ("units", "served"):
        with contextlib.ExitStack() as patches:
            if way == "units":
                patches.enter_context(mock.patch(TAKES[form], return_value=False))
                want = result(weights[0])
            error = float((result(weights[0]) - want).norm() / want.norm())
            took = time_of([lambda one=one: call(one) for one in weights])
        said = way if error < 1e-2 else f"{way}: OFF BY {error:.1e}"
        found.append({"name": f"{form} {name} {said}", "times": took, "bytes": weights[0].num_bytes})
    return found


def one_row_cases(time_of: TimeOf) -> list[Callable[[], list[dict]]]:
    """One group of cases per product."""
    return [lambda form=form, name=name: product_cases(time_of, form, name) for form in TAKES for name in PRODUCTS]
