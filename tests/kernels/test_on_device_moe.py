"""Kernels of experts on a real GPU against float64 references; a layer whose rows depend on no other row."""

from __future__ import annotations

import pytest
import torch

from engine.base.model_config import ExpertsConfig, Routing
from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Kind
from engine.kernels.gemm.groups import packed
from engine.kernels.gemm.pack import Placement
from engine.kernels.moe.capture import Capture
from engine.kernels.moe.coded import coded_product_reference, coded_tile, launch_coded_product
from engine.kernels.moe.combine import combine_reference, combine_then_norm, launch_combine
from engine.kernels.moe.dense import pairs_of
from engine.kernels.moe.expert_load import expert_load_reference, launch_expert_load
from engine.kernels.moe.grouped import Tile, grouped_reference, launch_grouped, tile_of
from engine.kernels.moe.grouped_persistent import launch_persistent
from engine.kernels.moe.mxfp4 import launch_mxfp4_product, mxfp4_product_reference, mxfp4_tile
from engine.kernels.moe.pairs import launch_pairs
from engine.kernels.moe.pairs_float8 import launch_pairs_float8
from engine.kernels.moe.route import launch_route, route_reference
from engine.kernels.moe.route_rows import is_plain, launch_route_rows
from engine.kernels.moe.sort import Pairs, launch_sort_pairs, sort_pairs_reference
from engine.kernels.moe.tiles import LINES
from engine.kernels.moe.values import launch_values_product, takes, values_tile
from engine.kernels.norm import rms_norm_reference
from engine.kernels.target import target
from engine.layers.moe import SparseMLP
from engine.layers.norm import Normed
from engine.models.registry import load_model_config
from tests import tiny
from tests.kernels.routings import ROUTINGS, scales_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
LIMIT = 8e-3  # bfloat16's rounding


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


@pytest.mark.parametrize("name", [*ROUTINGS, "Qwen3-30B-A3B"])
@pytest.mark.parametrize("rows", [1, 17, 300, 2100])
def test_routes(name, rows):
    """Compares rows in which chosen and other experts differ by more than rounding."""
    routing = ROUTINGS.get(name, Routing(128, 8, norm_topk_prob=True))
    x, router = draw(rows, 2048), draw(routing.num_experts, 2048) / 45
    correction = draw(routing.num_experts, dtype=torch.float32) if routing.correction else None
    bias = draw(routing.num_experts) if routing.top_k % 2 else None
    scales = scales_of(routing, "cuda")
    chosen, weights = launch_route(x, router, bias, correction, routing, scales=scales)
    want, weighed = route_reference(x.double(), router.double(), bias, correction, routing, scales=scales)
    same = (chosen == want).all(1)
    assert same.float().mean() > 0.98
    torch.testing.assert_close(weights[same].double(), weighed[same], rtol=1e-4, atol=1e-5)
    for _ in range(5):
        again = launch_route(x, router, bias, correction, routing, scales=scales)
        assert torch.equal(again[0], chosen)
        assert torch.equal(again[1], weights)
    few = launch_route(x[:17].contiguous(), router, bias, correction, routing, scales=scales)
    assert torch.equal(few[0], chosen[:17])
    assert torch.equal(few[1], weights[:17])
    count = torch.tensor([rows // 2], dtype=torch.int32, device="cuda")
    ids, mapping = torch.zeros(rows, 2, routing.top_k, dtype=torch.uint8, device="cuda"), torch.randperm(rows).cuda()
    padded = launch_route(x, router, bias, correction, routing, count, Capture(ids, mapping).layer(1), scales)
    assert torch.equal(ids[mapping[: rows // 2], 1].int(), chosen[: rows // 2])
    assert not ids[:, 0].any()
    assert torch.equal(padded[0][: rows // 2], chosen[: rows // 2])
    assert torch.equal(padded[1][: rows // 2], weights[: rows // 2])
    assert (padded[0][rows // 2 :] == routing.num_experts).all()
    few = launch_route(x[-1:], router, bias, correction, routing, scales=scales)
    assert torch.equal(few[0], chosen[-1:])
    assert torch.equal(few[1], weights[-1:])


@pytest.mark.parametrize("name", [name for name, each in ROUTINGS.items() if is_plain(each)] + ["Qwen3-30B-A3B"])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("depth", [2880, 5120])
def test_routes_of_few_rows(name, rows, depth):
    """Norm, experts and weights, as above; each row gets the same result as alone."""
    routing = ROUTINGS.get(name, Routing(128, 8, norm_topk_prob=True))
    x, gain, router = draw(rows, depth), draw(depth, dtype=torch.float32), draw(routing.num_experts, depth) / 53
    correction = draw(routing.num_experts, dtype=torch.float32) if routing.correction else None
    bias, scales = draw(routing.num_experts) if routing.top_k % 2 else None, scales_of(routing, "cuda")
    rest = (gain, 1e-5, router, bias, correction, routing)
    normed, chosen, weights, *_ = launch_route_rows(x, *rest, scales=scales)
    assert error(normed, rms_norm_reference(x.double(), gain.double(), 1e-5)) < LIMIT
    want, weighed = route_reference(normed.double(), *rest[2:], scales=scales)
    same = (chosen == want).all(1)
    assert same.sum() >= rows - 1
    torch.testing.assert_close(weights[same].double(), weighed[same].double(), rtol=1e-4, atol=1e-5)
    for row in range(rows):
        alone = launch_route_rows(x[row : row + 1], *rest, scales=scales)
        assert all(torch.equal(mine, whole[row : row + 1]) for mine, whole in zip(alone, (normed, chosen, weights)))
    count = torch.tensor([rows // 2], dtype=torch.int32, device="cuda")
    ids, mapping = torch.zeros(rows, 2, routing.top_k, dtype=torch.uint8, device="cuda"), torch.randperm(rows).cuda()
    padded = launch_route_rows(x, *rest, count, Capture(ids, mapping).layer(1), scales)
    assert torch.equal(ids[mapping[: rows // 2], 1].int(), chosen[: rows // 2])
    assert not ids[mapping[rows // 2 :]].any()
    assert torch.equal(padded[1][: rows // 2], chosen[: rows // 2])
    assert (padded[1][rows // 2 :] == routing.num_experts).all()
    assert not padded[2][rows // 2 :].any()


@pytest.mark.parametrize(
    ("experts", "top_k", "width", "depth"), [(128, 8, 768, 2048), (8, 2, 1792, 4096), (32, 4, 360, 720)]
)
def test_grouped_products(experts, top_k, width, depth):
    both, down = draw(experts, 2 * width, depth) / depth**0.5, draw(experts, depth, width) / width**0.5
    for rows in (1, 7, 64, 300, 2048):
        chosen = torch.rand(rows, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
        pairs = launch_sort_pairs(chosen, experts)
        want = sort_pairs_reference(chosen, experts)
        assert torch.equal(pairs.order.long(), want.order)
        assert torch.equal(pairs.ends.long(), want.ends)
        x = draw(rows, depth)
        tiles = [tile_of(target(), pairs.count, experts, gated, 2) for gated in (True, False)]
        made = launch_grouped(x, both, None, pairs, Activation.SILU, tiles[0])
        got = launch_grouped(made, down, None, pairs, None, tiles[1])
        if rows <= 64:
            assert error(made, grouped_reference(x, both, None, pairs, Activation.SILU)) < LIMIT
            assert error(got, grouped_reference(made, down, None, pairs, None)) < LIMIT
        for _ in range(3):
            assert torch.equal(launch_grouped(x, both, None, pairs, Activation.SILU, tiles[0]), made)
        given = torch.rand(rows, top_k, device="cuda")
        weighed = launch_grouped(x, both, None, pairs, Activation.SILU, tiles[0], given)
        if rows <= 64:
            assert error(weighed, grouped_reference(x, both, None, pairs, Activation.SILU, given)) < LIMIT


@pytest.mark.skipif(not target().begins_early, reason="no descriptors")
@pytest.mark.parametrize(
    ("experts", "top_k", "width", "depth"), [(128, 8, 768, 2048), (8, 2, 1792, 4096), (32, 4, 360, 720)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_many_pairs(experts, top_k, width, depth, biased):
    """Against moe/grouped; some rows are padding with arbitrary contents, and the last expert has no pair."""
    both, down = draw(experts, 2 * width, depth) / depth**0.5, draw(experts, depth, width) / width**0.5
    first, second = (draw(*weight.shape[:2]) if biased else None for weight in (both, down))
    for rows in (7, 300, 2049, 5000):
        chosen = torch.rand(rows, experts - 1, device="cuda").argsort(1)[:, :top_k].int().contiguous()
        chosen[rows * 3 // 4 :] = experts
        pairs, x, given = launch_sort_pairs(chosen, experts), draw(rows, depth), torch.rand(rows, top_k, device="cuda")
        real = int(pairs.ends[-1])
        x[rows * 3 // 4 :] = torch.nan
        order = pairs.order[:real].long()
        slow = [tile_of(target(), pairs.count, experts, gated, 2) for gated in (True, False)]
        for block_m, columns, stages, warps in ((128, 256, 4, 8), (64, 256, 2, 4), (128, 128, 3, 4)):
            tiles = [Tile(block_m, side, 64, stages, warps, persistent=True) for side in (columns // 2, columns)]
            gate = (x, both, first, pairs, Activation.SILU)
            made = launch_persistent(*gate, tiles[0])[:real]
            assert error(made, launch_grouped(*gate, slow[0])[:real]) < LIMIT
            assert torch.equal(made, launch_persistent(*gate, tiles[0])[:real])
            weighed = launch_persistent(*gate, tiles[0], given)[:real]
            assert error(weighed, launch_grouped(*gate, slow[0], given)[:real]) < LIMIT
            apart = (x, both, first, pairs, None)  # without an activation, one input row per token
            made_apart = launch_persistent(*apart, tiles[1], None, True)[:real]
            assert error(made_apart, launch_grouped(*apart, slow[1], None, True)[:real]) < LIMIT
            inner = torch.full((pairs.count, width), torch.nan, device="cuda", dtype=x.dtype)
            inner[:real] = made
            got = launch_persistent(inner, down, second, pairs, None, tiles[1])[order]
            assert error(got, launch_grouped(inner, down, second, pairs, None, slow[1])[order]) < LIMIT


@pytest.mark.parametrize(("rows", "last"), [(1, 1), (300, 64), (8192, 1)])
def test_the_expert_load_is_written_into_pinned_memory(rows, last):
    choices = torch.randint(0, 128, (48, 8 * 8192), dtype=torch.int32, device="cuda")
    tops, counts = torch.full((48,), 8, dtype=torch.int32, device="cuda"), torch.tensor([rows, last]).int().cuda()
    home, want = torch.zeros(48, 3, dtype=torch.int32, pin_memory=True), torch.zeros(48, 3, dtype=torch.int32)
    launch_expert_load(home, choices, tops, counts[:1], counts[1:], 128)
    torch.cuda.synchronize()
    expert_load_reference(want, choices.cpu(), tops.cpu(), *counts.cpu().split(1), 128)
    assert torch.equal(home, want)


@pytest.mark.parametrize(("kind", "group"), [(Kind.E2M1, 32), (Kind.E4M3, 128), (Kind.INT4, 128)])
def test_products_by_codes(kind, group):
    """With the tiles of gpt-oss-20b, for few, some and many rows."""
    experts, top_k, width, depth = 32, 4, 360, 2880
    values = torch.randint(0, 0x50 if kind is Kind.E4M3 else 16, (experts * 2 * width, depth), device="cuda")
    scale = torch.rand(experts * 2 * width, -(-depth // group), device="cuda").bfloat16() / 64
    weight = packed(Codes(kind, values.to(torch.uint8), scale, group))
    bias = draw(experts, 2 * width, dtype=torch.float32)
    for rows in (1, 7, 64, 300):
        chosen = torch.rand(rows, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
        pairs, x = pairs_of(chosen, experts, invariant=False), draw(rows, depth)
        tile = coded_tile(rows * top_k / experts, kind, group, 2, 3)
        got = launch_coded_product(x, weight, experts, bias, pairs, Activation.CLAMPED_SWIGLU, tile)
        assert torch.equal(got, launch_coded_product(x, weight, experts, bias, pairs, Activation.CLAMPED_SWIGLU, tile))
        if rows <= 64:
            want = coded_product_reference(x, weight, experts, bias, pairs, Activation.CLAMPED_SWIGLU, tile)
            assert error(got, want) < 2 * LIMIT


@pytest.mark.parametrize("activation", [None, Activation.CLAMPED_SWIGLU])
def test_products_by_mxfp4(activation):
    """With the tiles of gpt-oss-20b, for few, some and many rows."""
    experts, top_k, width, depth, gated = 32, 4, 360, 2880, activation is not None
    shape = (experts * width * (1 + gated), depth)
    scale = torch.randint(-9, -3, (shape[0], depth // 32), device="cuda").float().exp2().bfloat16()
    weight = packed(Codes(Kind.E2M1, torch.randint(0, 16, shape, device="cuda").to(torch.uint8), scale, 32))
    bias = draw(experts, width * (1 + gated), dtype=torch.float32)
    for rows in (1, 7, 64, 256, 1000, 5000):
        chosen = torch.rand(rows, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
        pairs = pairs_of(chosen, experts, invariant=False)
        each = 0 if pairs.order is None else rows * top_k / experts
        x, tile = draw(rows if gated else pairs.count, depth), mxfp4_tile(target(), each, 2, gated)
        arguments = (x, weight, experts, bias, pairs, activation, tile)
        got = launch_mxfp4_product(*arguments)
        assert torch.equal(got, launch_mxfp4_product(*arguments))
        slow = launch_coded_product(*arguments[:-1], coded_tile(rows * top_k / experts, Kind.E2M1, 32, 2, 3))
        assert error(got, slow) < LIMIT
        if rows <= 64:
            assert error(got, mxfp4_product_reference(*arguments)) < 2 * LIMIT


@pytest.mark.skipif(target().arch != "sm_90", reason="its instructions are Hopper's")
@pytest.mark.parametrize("activation", [None, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize(("form", "kind", "group", "zeros"), [
    ("MXFP4", Kind.E2M1, 32, False), ("INT4 by 128", Kind.INT4, 128, True), ("E4M3 by 128", Kind.E4M3, 128, False),
    ("E2M1 by 16", Kind.E2M1, 16, False), ("INT8 by rows", Kind.INT8, 0, False), ("NF4 by 64", Kind.NF4, 64, False),
])  # fmt: skip
def test_products_whose_scales_multiply_values(form, kind, group, zeros, activation):
    """With every tile of the form; columns end within an iteration; data after the rows of x must not matter."""
    experts, top_k, width, depth, gated = 16, 4, 360, 1216, activation is not None
    shape = (experts * width * (1 + gated), depth)
    values = torch.randint(0, {Kind.E4M3: 0x50, Kind.INT8: 256}.get(kind, 16), shape, device="cuda").to(torch.uint8)
    groups = -(-depth // group) if group else 1
    scale = torch.randint(-9, -3, (shape[0], groups), device="cuda").float().exp2()
    zero = torch.randint(-8, 8, scale.shape, device="cuda").to(torch.int8) if zeros else None
    scale = scale if kind is Kind.E4M3 else scale.bfloat16()
    values = values.view(torch.int8) if kind is Kind.INT8 else values
    weight = packed(Codes(kind, values, scale, group or depth, None, zero))
    bias = draw(experts, width * (1 + gated), dtype=torch.float32)
    lines = LINES["sm_90"].get(form, {})
    tiles = {tile for shape, line in lines.items() if shape.gated == gated for tile in line if tile.values}
    for rows in (9, 200):
        chosen = torch.rand(rows, experts, device="cuda").argsort(1)[:, :top_k].int()
        chosen[3] = experts  # a row of padding
        pairs = launch_sort_pairs(chosen.contiguous(), experts)
        count, apart = pairs.count - top_k, rows * top_k if not gated else rows
        x = draw(apart, depth)
        given = torch.rand(rows, top_k, device="cuda") if gated and zeros else None
        assert takes(x, weight, pairs)
        slow = (x, weight, experts, bias, pairs, activation, coded_tile(8, kind, weight.group, 2, 3), given)
        places = slice(count) if gated else pairs.order[:count].long()
        want = launch_coded_product(*slow)[places]
        for tile in {*tiles, *(values_tile(each, gated) for each in (8, 16, 64, 999))}:
            arguments = (*slow[:-2], tile, given)
            got = launch_values_product(*arguments)[places]
            assert error(got, want) < LIMIT, tile
            assert torch.equal(got, launch_values_product(*arguments)[places]), tile


@pytest.mark.parametrize(("width", "depth"), [(2880, 2880), (45, 64), (768, 4160)])
def test_both_products_of_the_pairs_of_a_row(width, depth):
    """Two products in sequence, as in a step, with matrix-unit operands loaded per thread; also in a graph."""
    experts, weights = 8, []
    for rows, columns in ((2 * width, depth), (depth, width + -width % 64)):
        shape = (experts * rows, columns)
        scale = torch.randint(-9, -3, (shape[0], columns // 32), device="cuda").float().exp2().bfloat16()
        weights.append(packed(Codes(Kind.E2M1, torch.randint(0, 16, shape, device="cuda").to(torch.uint8), scale, 32)))
    biases = draw(experts, 2 * width, dtype=torch.float32), draw(experts, depth, dtype=torch.float32)
    pairs, x = Pairs(4, torch.tensor([[5, 0, 7, 2]], dtype=torch.int32, device="cuda"), None, None), draw(1, depth)
    tile, act = mxfp4_tile(target(), 0, 2, True), Activation.CLAMPED_SWIGLU

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        made = launch_pairs(x, weights[0], experts, biases[0], pairs, act)
        wide = torch.nn.functional.pad(made, (0, -width % 64))
        return made, launch_pairs(wide, weights[1], experts, biases[1], pairs, None, first=False)

    made, got = run()
    want = mxfp4_product_reference(x.double(), weights[0], experts, biases[0], pairs, act, tile)
    assert error(made, want) < LIMIT
    rows = torch.nn.functional.pad(made, (0, -width % 64)).double()
    assert error(got, mxfp4_product_reference(rows, weights[1], experts, biases[1], pairs, None, tile)) < LIMIT
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run()
    for _ in range(20):
        graph.replay()
        assert torch.equal(again[0], made)
        assert torch.equal(again[1], got)


@pytest.mark.skipif(not target().runs_ptx, reason="its instructions are NVIDIA's")
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("group", [128, 0])
@pytest.mark.parametrize(("width", "depth"), [(768, 2048), (704, 4160), (64, 192)])
def test_both_products_of_few_rows_by_fp8(width, depth, group, rows):
    """All codes; two products in sequence, as in a step; also in a graph."""
    experts, weights = 40, []
    for shape in ((experts * 2 * width, depth), (experts * depth, width)):
        values = torch.randint(0, 0x7F, shape, device="cuda") + 0x80 * torch.randint(0, 2, shape, device="cuda")
        scale = torch.rand(shape[0], -(-shape[1] // group) if group else 1, device="cuda") / 1024
        weights.append(packed(Codes(Kind.E4M3, values.to(torch.uint8), scale, group or shape[1])))
    chosen = torch.rand(rows, experts, device="cuda").argsort(1)[:, :5].int().contiguous()
    pairs, x = Pairs(5, chosen, None, None), draw(rows, depth)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        made = launch_pairs_float8(x, weights[0], experts, None, pairs, Activation.SILU)
        return made, launch_pairs_float8(made, weights[1], experts, None, pairs, None)

    made, got = run()
    tile = coded_tile(1, Kind.E4M3, 128, 2, 3)
    want = coded_product_reference(x.double(), weights[0], experts, None, pairs, Activation.SILU, tile)
    assert error(made, want) < LIMIT
    want = coded_product_reference(made.double(), weights[1], experts, None, pairs, None, tile)
    assert error(got, want) < LIMIT
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run()
    for _ in range(20):
        graph.replay()
        assert torch.equal(again[0], made)
        assert torch.equal(again[1], got)


@pytest.mark.parametrize("rows", [1, 33, 300])
def test_combined_rows(rows):
    made, weights, shared = draw(rows, 8, 2048), torch.rand(rows, 8, device="cuda"), draw(rows, 2048)
    gate, residual, gain = draw(rows, 1), draw(rows, 2048), draw(2048, dtype=torch.float32)
    want = combine_reference(made.double(), weights, shared, gate, residual.double(), None)
    assert error(launch_combine(made, weights, shared, gate, residual.clone(), None), want) < LIMIT
    after = combine_then_norm(made, weights, shared, gate, residual, gain, 1e-6)
    assert error(residual, want) < LIMIT
    assert (after is not None) == (rows <= 64)
    if after is not None:
        assert error(after.rows, want * gain) < LIMIT
        assert error(after.squares.sum(0), want.square().sum(1)) < LIMIT


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_rows_of_an_invariant_layer_depend_on_no_other_row(name):
    text = load_model_config(tiny.checkpoint(name)).text
    config = next(layer.experts for layer in text.layers if layer.experts)
    assert isinstance(config, ExpertsConfig)
    layer = SparseMLP(text, config)
    parts = [layer.router, layer.gate_up, layer.down]
    if layer.shared is not None:
        parts += [layer.shared.gate_up, layer.shared.down, layer.shared_gate]
    for part in parts:
        drawn = {kind: [draw(*piece.shape) / 5 for piece in pieces] for kind, pieces in part.expects().items()}
        part.fill(drawn, Placement(torch.bfloat16, "cuda", invariant=True))
    x = draw(257, text.hidden_size)
    whole = layer(Normed(None, x)).value()
    for rows in (1, 2, 31):
        assert torch.equal(layer(Normed(None, x[:rows])).value(), whole[:rows])
