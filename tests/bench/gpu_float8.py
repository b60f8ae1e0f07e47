"""FP8 products of the vendor's library as the server calls it, for gpu_kernels, and their share of the FP8 rate.

Forms: by rows (one scale per row of either side) and by blocks (one scale per 128 columns of x, and per 128 x 128 of
the weight). Codes have both signs, as the card's clock depends on the values. x is already quantised. "8192^3" measures
the card's FP8 rate in each form. The four products of the 8B follow, each with TFLOP/s and the share of the larger
rate; QUANTIZATION.md section 8 requires 60 % from 512 rows on. "served" is the time that a layer takes for the same
codes: with our kernel where our kernel was faster. Then few rows by the products of a layer of Qwen3.6-35B-A3B and
of Qwen3.5-27B, also with "tiles": our kernel for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.dispatch_float8 import FLOAT8, TILES, Product, choose
from engine.kernels.gemm.float8_library import library_product
from engine.kernels.gemm.float8_weight import Float8Weight, pack_float8
from engine.kernels.gemm.quantise_floats import quantise_floats
from engine.kernels.gemm.scaled import ScaledProducts
from tests.bench.gpu_one_row import PRODUCTS

Shapes = dict[str, tuple[int, int]]
TimeOf = Callable[[list[Callable[[], object]]], tuple[float, float, float]]
SIDE, ROWS = 8192, (512, 2048)
FEW, MOST_FEW = (2, 4, 8, 16), 16
OF_35B = {"q|k|v|z": (12288, 2048), "o": (2048, 4096), "shared gate|up": (1024, 2048), "shared down": (2048, 512)}
OF_27B = {"q|k|v|z": (16384, 5120), "o": (5120, 6144), "gate|up": (34816, 5120), "down": (5120, 17408)}
LAYERS = {  # of a model with states
    f"layer of the {name}": {f"{name} {what}": sides for what, sides in shapes.items()}
    for name, shapes in (("35B", OF_35B), ("27B", OF_27B))
}
FORMS = {"rows": Inputs(kind=Kind.E4M3), "blocks": Inputs(kind=Kind.E4M3, group=128)}
CACHE = 120 << 20  # bytes, more than any cache holds
ASKED = 0.6  # required share of the FP8 rate


def weight(form: str, width: int, depth: int, products: ScaledProducts, device: str = "cuda") -> Float8Weight:
    """A weight of normally distributed codes, up to 448 / 4."""
    values = (torch.randn(width, depth, device=device) * 28).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale, group = torch.rand(width, 1, device=device) + 0.5, depth
    if form == "blocks":
        blocks = torch.rand(width // 128, depth // 128, device=device) + 0.5
        scale, group = blocks.repeat_interleave(128, 0), 128
    codes = Codes(Kind.E4M3, values.view(torch.uint8), scale, group, inputs=FORMS[form])
    return pack_float8(codes, None, torch.bfloat16, products, invariant=False)


class Rate:
    """The largest FP8 rate measured so far."""

    def __init__(self) -> None:
        self.best = 0.0

    def said(self, flops: float, seconds: float) -> str:
        rate = flops / seconds
        share = rate / self.best if self.best else 1.0
        asked = "" if share == 1.0 else f" >= {ASKED:.0%} {'met' if share >= ASKED else 'MISSED'}"
        return f"{rate / 1e12:.0f} TFLOP/s, {share:.1%} of the FP8 rate{asked}"


def served_product(one: Float8Weight, x: Tensor, scales: Tensor, out: Tensor) -> None:
    """The product of codes [M, K] by the kernel that a layer uses for them."""
    product = Product(x, scales, one.weight, is_librarys=one.products.is_librarys)
    choose(FLOAT8, product).launch(product, None, out)


def library_way(one: Float8Weight, x: Tensor, scales: Tensor, out: Tensor) -> None:
    library_product(x, scales, one.weight, None, None, out)


def tiles_product(one: Float8Weight, x: Tensor, scales: Tensor, out: Tensor) -> None:
    """The product by the kernel for any number of rows."""
    TILES.launch(Product(x, scales, one.weight), None, out)


def square_case(time_of: TimeOf, form: str, rate: Rate, side: int = SIDE, device: str = "cuda") -> list[dict]:
    """Times a square product; `rate.best` becomes its rate if that is the largest so far."""
    held = weight(form, side, side, ScaledProducts(), device)
    x, scales = quantise_floats(torch.randn(side, side, device=device, dtype=torch.bfloat16), held.inputs)
    out, flops = torch.empty(side, side, device=device, dtype=torch.bfloat16), 2 * side**3
    took = time_of([lambda: library_product(x, scales, held.weight, None, None, out)])
    rate.best = max(rate.best, flops / took[0])
    return [{"name": f"FP8 {form} {side}^3", "times": took, "bytes": 2 * side**2 + out.nbytes, "flops": flops,
             "said": f"{flops / took[0] / 1e12:.0f} TFLOP/s"}]  # fmt: skip


def product_cases(
    time_of: TimeOf,
    form: str,
    rows: int,
    rate: Rate,
    device: str = "cuda",
    shapes: Shapes | None = None,
    layer: str = "layer",
) -> list[dict]:
    """Times products, by default the four of the 8B, and their sums, named `layer`: by the library, as a layer calls
    them, and few rows by tiles."""
    ways = {"library": library_way, "served": served_product, **({"tiles": tiles_product} if rows <= MOST_FEW else {})}
    found, sums, work = [], dict.fromkeys(ways, 0.0), 0
    for name, (width, depth) in (shapes or PRODUCTS).items():
        products = ScaledProducts()
        held = [weight(form, width, depth, products, device) for _ in range(max(2, CACHE // (width * depth)))]
        x, scales = quantise_floats(torch.randn(rows, depth, device=device, dtype=torch.bfloat16), FORMS[form])
        out, flops = torch.empty(rows, width, device=device, dtype=torch.bfloat16), 2 * rows * width * depth
        work += flops
        for one in held:
            products.record(one.weight)
        products.autotune([rows], torch.bfloat16)

        for way, call in ways.items():
            took = time_of([partial(call, one, x, scales, out) for one in held])
            sums[way] += took[0]
            case = {"name": f"FP8 {form} {name} {rows} {way}", "times": took, "flops": flops}
            found.append(case | {"bytes": width * depth + x.nbytes + out.nbytes, "said": rate.said(flops, took[0])})
    for way, seconds in sums.items():
        case = {"name": f"FP8 {form} {layer} {rows} {way}", "times": (seconds,) * 3, "bytes": 0, "flops": work}
        found.append(case | {"said": rate.said(work, seconds)})
    return found


def float8_cases(time_of: TimeOf) -> list[Callable[[], list[dict]]]:
    """All cases; those that measure the card's rates come first."""
    rate = Rate()
    groups: list[Callable[[], list[dict]]] = [lambda form=form: square_case(time_of, form, rate) for form in FORMS]
    groups += [partial(product_cases, time_of, form, rows, rate) for form in FORMS for rows in ROWS]
    for layer, shapes in LAYERS.items():
        groups += [partial(product_cases, time_of, "blocks", rows, rate, shapes=shapes, layer=layer) for rows in FEW]
    return groups
