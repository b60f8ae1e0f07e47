"""Experts with FP8 weights and FP8 inputs on a real GPU, against float64 references of the same codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.base.model_config import Routing
from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.float8_weight import pack_float8
from engine.kernels.gemm.quantise_floats import CodedRows, quantise_floats
from engine.kernels.gemm.scaled import ScaledProducts
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.float8 import (
    float8_experts_reference,
    float8_tile,
    launch_float8_experts,
    pack_float8_experts,
)
from engine.kernels.moe.float8_weight import Float8Experts
from engine.kernels.moe.grouped import Tile
from engine.kernels.moe.pairs_float8 import launch_pairs_float8
from engine.kernels.moe.route_rows import launch_route_rows
from engine.kernels.moe.sort import Pairs, launch_sort_pairs
from engine.kernels.moe.tiles import LINES
from engine.kernels.target import target

CARD = torch.cuda.is_available() and target().multiplies_float8
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CARD, reason="no units for FP8")]
LIMIT = 8e-3  # bfloat16's rounding
TURNED = 2e-2  # if sums have another order, some codes become their neighbours
GROUPS, ROWS = Inputs(kind=Kind.E4M3, group=128), Inputs(kind=Kind.E4M3)
POWERS, GIVEN = Inputs(kind=Kind.E4M3, group=128, powers=True), Inputs(torch.tensor(0.01), Kind.E4M3)
TILES = [
    Tile(16, 128, 128, 3, 4),
    Tile(64, 128, 128, 4, 8),
    Tile(128, 128, 128, 3, 8),
    Tile(64, 128, 128, 3, 8, least=16),
]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def weight_of(experts: int, rows: int, depth: int, width: int, blocked: bool):
    """Random codes except NaN; scales per block if `blocked`, else per row."""
    shape = (experts * rows, depth)
    values = torch.randint(0, 0x7F, shape, device="cuda") + 0x80 * torch.randint(0, 2, shape, device="cuda")
    scale = torch.rand(-(-shape[0] // 128), -(-depth // 128) if blocked else 1, device="cuda") / 1024
    scale = scale.repeat_interleave(128, 0)[: shape[0]].contiguous()
    return pack_float8_experts(Codes(Kind.E4M3, values.to(torch.uint8), scale, 128 if blocked else depth), width)


def some_pairs(rows: int, experts: int, top_k: int) -> Pairs:
    chosen = torch.rand(rows, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
    chosen[rows // 2] = experts  # a row of padding
    pairs = launch_sort_pairs(chosen, experts)
    assert pairs.order is not None
    # The kernel leaves these places undefined, and the reference reads them.
    pairs.order[pairs.count - top_k :] = rows // 2 * top_k + torch.arange(top_k, device="cuda")
    return pairs


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("width", "depth"), [(768, 2048), (2048, 768), (200, 1216), (45, 80)])
def test_products_of_sorted_pairs(width, depth, gated, blocked):
    """With every committed tile and the rule's tiles; a second run and a graph give the same bits."""
    experts, top_k, act = 16, 4, Activation.SILU if gated else None
    weight, inputs = weight_of(experts, width * (1 + gated), depth, width, blocked), GROUPS if blocked else ROWS
    bias = torch.randn(experts, width * (1 + gated), device="cuda")
    lines = LINES.get(target().arch, {}).get("E4M3 by E4M3", {})
    tiles = {tile for shape, line in lines.items() if shape.gated == gated for tile in line}
    tiles |= {float8_tile(target(), each, gated) for each in (8, 32, 64, 999)} | {
        tile for tile in TILES if gated or not tile.least
    }
    for rows in (9, 300):
        pairs = some_pairs(rows, experts, top_k)
        x = quantise_floats(draw(rows if gated else pairs.count, depth), inputs)
        given = torch.rand(rows, top_k, device="cuda") if gated else None
        places = slice(pairs.count - top_k) if gated else pairs.order[: pairs.count - top_k].long()
        for then in (None, GROUPS, POWERS) if gated and depth % 16 == 0 else (None,):
            rest = torch.bfloat16, given, then
            want = float8_experts_reference(x, weight, experts, bias, pairs, act, TILES[0], *rest)
            for tile in sorted(tiles):
                arguments = (x, weight, experts, bias, pairs, act, tile, *rest)
                made = launch_float8_experts(*arguments)
                again = launch_float8_experts(*arguments)
                if isinstance(made, CodedRows):
                    assert isinstance(want, CodedRows)
                    assert torch.equal(made.codes[places], again.codes[places])
                    times = made.scales[:, places] / want.scales[:, places]
                    # A sum near the border between two powers of two may give the other one.
                    turned = (times - 1).abs() > 2e-2
                    assert turned.float().mean() <= (2e-3 if then is POWERS else 0)
                    assert times.min() >= 0.49
                    assert times.max() <= 2.01
                    assert error(made.dense()[places], want.dense()[places]) < TURNED, tile
                else:
                    assert torch.equal(made[places], again[places])
                    assert error(made[places], want[places]) < LIMIT, tile


def test_codes_behind_an_activation_are_those_of_its_floats():
    weight, pairs = weight_of(16, 1536, 2048, 768, True), some_pairs(300, 16, 4)
    x = quantise_floats(draw(300, 2048), GROUPS)
    count = pairs.count - 4
    for tile in TILES:
        arguments = (x, weight, 16, None, pairs, Activation.SILU, tile, torch.bfloat16, None)
        floats = launch_float8_experts(*arguments)
        for inputs in (GROUPS, POWERS):
            made, want = launch_float8_experts(*arguments, inputs), quantise_floats(floats, inputs)
            assert torch.equal(made.codes[:count], want.codes[:count])
            assert torch.equal(made.scales[:, :count], want.scales[:, :count])


@pytest.mark.skipif(not target().runs_ptx, reason="its instructions are NVIDIA's")
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("inputs", [GROUPS, POWERS, ROWS, GIVEN])
@pytest.mark.parametrize(("width", "depth"), [(768, 2048), (704, 4160), (64, 192)])
def test_both_products_of_few_rows(width, depth, inputs, rows):
    """All codes; x quantised before or inside the product; in a graph too; compared with sorted pairs' reference."""
    experts, blocked = 40, inputs.group > 0
    inputs = Inputs(None if inputs.scale is None else inputs.scale.cuda(), Kind.E4M3, inputs.group, inputs.powers)
    first, second = (
        weight_of(experts, 2 * width, depth, width, blocked),
        weight_of(experts, depth, width, depth, blocked),
    )
    chosen = torch.rand(rows, experts, device="cuda").argsort(1)[:, :5].int().contiguous()
    pairs, x = Pairs(5, chosen, None, None), draw(rows, depth)
    coded = quantise_floats(x, inputs)

    def run(x: torch.Tensor | CodedRows) -> tuple[torch.Tensor, torch.Tensor]:
        made = launch_pairs_float8(x, first, experts, None, pairs, Activation.SILU, None, None, inputs)
        return made, launch_pairs_float8(made, second, experts, None, pairs, None, None, None, inputs)

    made, got = run(x)
    assert all(torch.equal(one, other) for one, other in zip(run(coded), (made, got)))
    rest = experts, None, pairs, Activation.SILU, TILES[0], torch.bfloat16
    assert error(made, float8_experts_reference(coded, first, *rest)) < LIMIT
    want = float8_experts_reference(quantise_floats(made, inputs), second, *rest[:3], None, *rest[4:])
    assert error(got, want) < LIMIT
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(x)
    for _ in range(20):
        graph.replay()
        assert torch.equal(again[0], made)
        assert torch.equal(again[1], got)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("inputs", [GROUPS, ROWS])
def test_a_shared_expert_is_multiplied_with_the_others(inputs, rows):
    """As apart; a shared expert of another width is not taken."""
    experts, width, depth, blocked = 40, 512, 2048, inputs.group > 0
    rest = inputs, experts, None, torch.bfloat16, False
    first = Float8Experts(weight_of(experts, 2 * width, depth, width, blocked), *rest)
    second = Float8Experts(weight_of(experts, depth, width, depth, blocked), *rest)
    products = ScaledProducts()

    def alone(rows: int, columns: int) -> Weight:
        dense = weight_of(1, rows, columns, rows, blocked)
        scale = dense.row_scales[:, None] if dense.scales is None else dense.scales[:, : columns // 128]
        codes = Codes(Kind.E4M3, dense.codes, scale.repeat_interleave(dense.tall, 0), columns, inputs=inputs)
        return pack_float8(replace(codes, group=128) if blocked else codes, None, torch.bfloat16, products, False)

    shared = alone(2 * width, depth), alone(depth, width)
    x, chosen = draw(rows, depth), torch.rand(rows, experts, device="cuda").argsort(1)[:, :5].int().contiguous()
    pairs, codes = first.pairs(chosen), quantise_floats(x, inputs)
    made, own = first.of_mlp_and_shared(second, shared, x, codes, pairs, Activation.SILU)
    assert torch.equal(made, first.of_mlp(second, x, codes, pairs, Activation.SILU, None))
    assert error(own, shared[1].of_halves(shared[0].linear(x), Activation.SILU)) < TURNED
    other = alone(width, depth), alone(depth, width // 2)
    assert first.of_mlp_and_shared(second, other, x, codes, pairs, Activation.SILU) is None


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_layer_has_nearly_the_same_rows_in_any_company(blocked, invariant):
    """Rows alone and among others; with --deterministic their bits are equal."""
    inputs = GROUPS if blocked else ROWS
    rest = inputs, 64, None, torch.bfloat16, invariant
    first = Float8Experts(weight_of(64, 1536, 2048, 768, blocked), *rest)
    second = Float8Experts(weight_of(64, 2048, 768, 2048, blocked), *rest)
    x, chosen = draw(400, 2048), torch.rand(400, 64, device="cuda").argsort(1)[:, :8].int().contiguous()

    def made(rows: slice) -> torch.Tensor:
        pairs, codes = first.pairs(chosen[rows].contiguous()), quantise_floats(x[rows], inputs)
        return first.of_mlp(second, x[rows], codes, pairs, Activation.SILU, None)

    whole = made(slice(0, 400))
    for rows in (slice(7, 8), slice(3, 6), slice(0, 17), slice(100, 180)):
        some = made(rows)
        assert torch.equal(some, whole[rows]) if invariant else error(some, whole[rows]) < TURNED


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("inputs", [GROUPS, POWERS, ROWS])
def test_a_norm_gives_the_codes_of_its_rows(rows, inputs):
    """For few rows the program after the routing programs makes the codes; the routing does not change."""
    routing, x, router = Routing(128, 8, norm_topk_prob=True), draw(rows, 2048), draw(128, 2048) / 45
    gain = torch.rand(2048, device="cuda")
    if rows <= 16:
        rest = (x, gain, 1e-6, router, None, None, routing)
        native = target().widens_fp8
        gate = draw(1, 2048)
        normed, *chosen, codes, gates = launch_route_rows(*rest, inputs=inputs, native=native, gate=gate)
        torch.testing.assert_close(gates, normed.float() @ gate.float().T, rtol=1e-4, atol=1e-3)
        plain = launch_route_rows(*rest)
        assert all(torch.equal(one, other) for one, other in zip((normed, *chosen), plain))
    else:
        normed = torch.empty_like(x)
        codes = quantise_floats(x, inputs, gain, 1e-6, normed=normed)
    want = quantise_floats(normed, inputs)
    assert torch.equal(codes.codes, want.codes)
    assert torch.equal(codes.scales, want.scales)
