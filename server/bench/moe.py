"""bench moe: times a layer of experts by rows (route, products, sum), against the machine's rates and torch.

Owner: main thread. The floor is the larger of two times: reading the bytes of the chosen experts, in the form of
--form, at a copy's rate; and computing their products at the rate of a product of floats. Products of FP8 inputs and
FP8 weights may be faster than the floor. The norm before a layer quantises its rows, so this is not timed. The
reference computes the chosen experts one by one with torch's products of floats.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from engine.base.model_config import Routing
from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.quantise_floats import CodedRows, quantise_floats
from engine.kernels.moe.combine import combine
from engine.kernels.moe.pack import pack_experts, pack_router
from engine.kernels.moe.route import route
from server.bench.linear import CODES, codes_of
from server.bench.options import MoeOptions
from server.bench.output import finish
from server.bench.timing import chosen_device, rates, time_of


def run(options: MoeOptions) -> int:
    """The command's exit status."""
    try:
        device = chosen_device(options.device)
        if options.top_k > options.experts:
            raise ValueError(f"--top-k {options.top_k}: must be at most --experts {options.experts}")
        group = 0 if options.form == "floats" else CODES[options.form][1]
        if group and (options.hidden % group or options.width % group):
            raise ValueError(
                f"--form {options.form}: --hidden {options.hidden} and --width {options.width} must be multiples of "
                f"{group}, the columns that share a scale; change the sizes, or take another --form"
            )
    except ValueError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 2
    with torch.inference_mode():
        return finish(options, measure(options, device))


def measure(options: MoeOptions, device: str) -> dict[str, float]:
    """Microseconds of the layer's parts, by rows."""
    hidden, width, count = options.hidden, options.width, options.experts
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    copied, multiplied = rates(device, dtype)
    placement, routing = Placement(dtype, device), Routing(count, options.top_k, norm_topk_prob=True)
    gate_up = [matrix(options.form, 2 * width, hidden, device, dtype) for _ in range(count)]
    down = [matrix(options.form, hidden, width, device, dtype) for _ in range(count)]
    router = pack_router(torch.randn(count, hidden, device=device, dtype=dtype) / hidden**0.5, None, placement)
    first = pack_experts(gate_up, None, count, placement, gated=True)
    second = pack_experts(down, None, count, placement, gated=False)
    floats = [[as_floats(each, dtype) for each in matrices] for matrices in (gate_up, down)]
    each_bytes = (first.num_bytes + second.num_bytes) / count
    found = {"copy_gigabytes_per_s": copied / 1e9, "product_gigaflops_per_s": multiplied / 1e9}
    for rows in options.rows:
        x = torch.randn(rows, hidden, device=device, dtype=dtype)
        chosen, given = route(x, router, None, routing)
        codes = None if first.inputs is None else quantise_floats(x, first.inputs)

        def products(x: Tensor = x, chosen: Tensor = chosen, codes: CodedRows | None = codes) -> Tensor:
            return first.of_mlp(second, x, codes, first.pairs(chosen), Activation.SILU, None)

        made, residual = products(), torch.zeros_like(x)
        touched, values = len(chosen.unique()), 3 * hidden * width
        floor = max(each_bytes * touched / copied, 2 * values * chosen.numel() / multiplied)
        took = time_of([products], device)
        found |= {
            f"{rows}_experts_touched": float(touched),
            f"{rows}_route_us": time_of([partial(route, x, router, None, routing)], device) * 1e6,
            f"{rows}_products_us": took * 1e6,
            f"{rows}_products_of_floor": floor / took,
            f"{rows}_sum_us": time_of([partial(combine, made, given, None, None, residual)], device) * 1e6,
            f"{rows}_torch_products_us": time_of([partial(reference, x, chosen, *floats)], device, recorded=False)
            * 1e6,
        }
    return found


def matrix(form: str, rows: int, columns: int, device: str, dtype: torch.dtype) -> Codes | Tensor:
    """Random weights, as checkpoints of this form have them."""
    if form == "floats":
        return torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5
    return codes_of(form, rows, columns, device)


def as_floats(each: Codes | Tensor, dtype: torch.dtype) -> Tensor:
    return each.dense().to(dtype) if isinstance(each, Codes) else each


def reference(x: Tensor, chosen: Tensor, gate_up: list[Tensor], down: list[Tensor]) -> Tensor:
    """[rows, top_k, hidden]: torch's products, expert by expert."""
    out = x.new_empty(*chosen.shape, x.shape[1])
    for expert in chosen.unique().tolist():
        row, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[row] @ gate_up[expert].T).chunk(2, dim=-1)
        out[row, place] = (torch.nn.functional.silu(gate) * up) @ down[expert].T
    return out
