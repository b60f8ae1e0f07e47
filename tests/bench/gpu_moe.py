"""Experts on the GPU, for gpu_kernels: a layer's grouped products, and its routing, sort and sum, by rows.

The router's matrix and the rows are random normal numbers, so the expert load is that of random tokens. "skewed" adds
one direction to a quarter of the rows, which then all choose the same expert; its time may be at most 1.25 times that
of the even case. The bytes of a case are those of the experts that its rows chose. At 2,048 rows the share of the
larger bound is reported: bytes at the copy rate, or products at the rate of bfloat16. Calls alternate between two
layers, each larger than the cache. gpt-oss has MXFP4. Experts in FP8 take FP8 inputs, which the preceding norm
quantises. For few rows the norm is part of the launch that routes the rows and is timed; for more rows it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.base.model_config import Routing
from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.groups import packed
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.quantise_floats import quantise_floats
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.coded_weight import CodedExperts
from engine.kernels.moe.combine import combine
from engine.kernels.moe.dense import DenseExperts
from engine.kernels.moe.float8 import pack_float8_experts
from engine.kernels.moe.float8_weight import Float8Experts
from engine.kernels.moe.pack import pack_router
from engine.kernels.moe.route import route
from engine.kernels.moe.route_rows import route_of_normed, takes
from engine.kernels.moe.weight import ExpertsWeight

COLD = 1 << 28  # bytes, more than any cache holds
SKEWED = "Qwen3-30B-A3B", "Qwen3-30B-A3B FP8", "gpt-oss-20b"
MOST = 1.25  # largest ratio to the even case
TimeOf = Callable[[list[Callable[[], object]]], tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a layer with experts."""

    hidden: int
    width: int
    routing: Routing
    codes: Kind | None = None  # E2M1: MXFP4; E4M3: by blocks; None: bfloat16


SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, Routing(128, 8, norm_topk_prob=True)),
    "Qwen3-30B-A3B FP8": Shape(2048, 768, Routing(128, 8, norm_topk_prob=True), Kind.E4M3),
    "gpt-oss-20b": Shape(2880, 2880, Routing(32, 4, norm_topk_prob=True), Kind.E2M1),
    "Mixtral-8x7B": Shape(4096, 14336, Routing(8, 2, norm_topk_prob=True)),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def experts(shape: Shape, rows: int, columns: int) -> ExpertsWeight:
    """The matrices [rows, columns] of all experts."""
    count = shape.routing.num_experts
    if shape.codes is None:
        return DenseExperts(draw(count, rows, columns) / columns**0.5, None, invariant=False)
    group, codes = (32, 16) if shape.codes is Kind.E2M1 else (128, 0x50)
    values = torch.randint(0, codes, (count * rows, columns), device="cuda", dtype=torch.uint8)
    dtype = torch.float32 if shape.codes is Kind.E4M3 else torch.bfloat16  # the dtypes of checkpoints of these forms
    scale = torch.full((count * rows, columns // group), 2.0**-6, device="cuda", dtype=dtype)
    held = Codes(shape.codes, values, scale, group)
    if shape.codes is Kind.E4M3:
        weight, inputs = pack_float8_experts(held, rows), Inputs(kind=Kind.E4M3, group=128)
        return Float8Experts(weight, inputs, count, None, torch.bfloat16, invariant=False)
    return CodedExperts(packed(held), count, None, invariant=False)


def layer_cases(time_of: TimeOf, name: str, rows: int, skewed: bool = False) -> list[dict]:
    """The grouped products of a layer, and its routing, sort and sum."""
    shape = SHAPES[name]
    routing, hidden, width = shape.routing, shape.hidden, shape.width
    placement = Placement(torch.bfloat16, "cuda")
    routers = [pack_router(draw(routing.num_experts, hidden) / hidden**0.5, None, placement) for _ in range(2)]
    most = 3 * hidden * width * rows * routing.top_k  # codes of a layer that the rows read
    layers = [
        (experts(shape, 2 * width, hidden), experts(shape, hidden, width)) for _ in range(2 if most > COLD else 6)
    ]
    x = draw(rows, hidden)
    if skewed:
        x[: rows // 4] += 2 * routers[0].dense()[3] * hidden**0.5
    chosen, _ = route(x, routers[0], None, routing)
    touched, inputs = len(chosen.unique()), layers[0][0].inputs
    codes = None if inputs is None else quantise_floats(x, inputs)

    def products(layer: tuple[ExpertsWeight, ExpertsWeight]) -> torch.Tensor:
        pairs = layer[0].pairs(chosen)
        return layer[0].of_mlp(layer[1], x, codes, pairs, Activation.SILU, None)

    made, residual = products(layers[0]), draw(rows, hidden)

    gain = torch.ones(hidden, device="cuda")

    def around(router: Weight) -> None:
        if takes(x, router, routing):
            _, found, given, *_ = route_of_normed(x, gain, 1e-6, router, None, routing, inputs=inputs)
        else:
            found, given = route(x, router, None, routing)
        layers[0][0].pairs(found)
        combine(made, given, None, None, residual)

    label = f"{name} {rows}{' skewed' if skewed else ''}"
    values = 3 * hidden * width
    read = touched * sum(each.num_bytes for each in layers[0]) // routing.num_experts
    return [
        {"name": f"experts {label}", "times": time_of([lambda each=each: products(each) for each in layers]),
         "bytes": read, "flops": 2 * values * chosen.numel()},
        {"name": f"route, sort, sum {label}", "times": time_of([lambda each=each: around(each) for each in routers]),
         "bytes": 2 * rows * hidden * (routing.top_k + 3)},
    ]  # fmt: skip


def moe_cases(time_of: TimeOf) -> list[Callable[[], list[dict]]]:
    """One group of cases per shape and number of rows."""
    groups: list[Callable[[], list[dict]]] = [
        lambda name=name, rows=rows: layer_cases(time_of, name, rows)
        for name in SHAPES
        for rows in (1, 32, 256, 2048, 8192)
    ]
    return groups


def skewed_cases(time_of: TimeOf) -> list[Callable[[], list[dict]]]:
    """One group per shape: the even case, and the skewed case with its ratio to the even case."""

    def both(name: str) -> list[dict]:
        even, skewed = (layer_cases(time_of, name, 2048, skewed)[0] for skewed in (False, True))
        times = skewed["times"][0] / even["times"][0]
        skewed["said"] = f"{times:.2f} times the even case, <= {MOST} {'met' if times <= MOST else 'MISSED'}"
        return [even, skewed]

    return [lambda name=name: both(name) for name in SKEWED]
