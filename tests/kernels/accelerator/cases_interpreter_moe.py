"""Kernels of experts in the interpreter against their references: routes, sorted pairs, grouped products, sums.

Products run in float32 and float16: the interpreter stores bfloat16 as integers and cannot multiply bfloat16.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.base.model_config import Routing
from engine.kernels.activation import Activation
from engine.kernels.gemm.epilogue import empty_unscaled
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.moe import grouped_persistent, route
from engine.kernels.moe.capture import Capture
from engine.kernels.moe.combine import BLOCK, combine_reference, launch_combine
from engine.kernels.moe.expert_load import expert_load_reference, launch_expert_load
from engine.kernels.moe.grouped import Tile, grouped_reference, launch_grouped
from engine.kernels.moe.grouped_persistent import launch_persistent
from engine.kernels.moe.route import launch_route, route_reference
from engine.kernels.moe.route_rows import is_plain, launch_route_rows, route_rows_reference
from engine.kernels.moe.sort import Pairs, launch_sort_pairs, sort_pairs_reference
from engine.kernels.target import HAS_TRITON, Target
from engine.models.transformers_backend import experts as backend
from tests.kernels.routings import ROUTINGS, scales_of

# NumPy warns about operations on NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


@pytest.fixture(autouse=True)
def seed():
    assert HAS_TRITON
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ROUTINGS)
def test_routes(name):
    """The rows include ties, a NaN and an infinity."""
    routing = ROUTINGS[name]
    x, router = torch.randn(19, 40), torch.randn(routing.num_experts, 40) / 4
    correction = torch.randn(routing.num_experts) / 4 if routing.correction else None
    bias = torch.randn(routing.num_experts) if routing.top_k % 2 else None
    x[3] = 0.0  # without a bias all logits are equal
    x[7, 5], x[8, 5] = math.nan, math.inf
    scales = scales_of(routing)
    want, weighed = route_reference(x, router, bias, correction, routing, scales=scales)
    got, weights = launch_route(x, router, bias, correction, routing, scales=scales)
    assert torch.equal(got, want)
    torch.testing.assert_close(weights, weighed, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert got[7].tolist() == list(range(routing.top_k))
    assert weights[7].isnan().all()
    assert not arrivals(x.device).any()


@pytest.mark.parametrize("name", [name for name, each in ROUTINGS.items() if is_plain(each)])
def test_routes_of_few_rows(name):
    """The rows include ties and a NaN. The last row is padding, and the third row has no place in the capture."""
    routing, gain = ROUTINGS[name], torch.randn(40)
    x, router = torch.randn(4, 40), torch.randn(routing.num_experts, 40) / 4
    correction = torch.randn(routing.num_experts) / 4 if routing.correction else None
    bias = torch.randn(routing.num_experts) if routing.top_k % 2 else None
    x[1], x[2, 5] = 0.0, math.nan
    rest = (x, gain, 1e-5, router, bias, correction, routing, torch.tensor([3], dtype=torch.int32))
    ids, mapping = torch.zeros(9, 2, routing.top_k, dtype=torch.uint8), torch.tensor([8, 0, -1, 4])
    lasting, scales = torch.zeros(64, dtype=torch.int32), scales_of(routing)
    for _ in range(2):
        rows, chosen, weights, *_ = launch_route_rows(*rest, Capture(ids, mapping).layer(1), scales, lasting)
        want = route_rows_reference(*rest, scales)
        torch.testing.assert_close(rows, want[0], equal_nan=True)
        assert torch.equal(chosen, want[1])
        torch.testing.assert_close(weights, want[2], equal_nan=True)
    assert torch.equal(lasting[: chosen.numel()].view(4, -1), chosen)
    assert torch.equal(ids[[8, 0], 1].int(), chosen[:2])
    assert ids.sum() == chosen[:2].sum()
    assert not arrivals(x.device).any()


def test_programs_of_more_experts_choose_the_same(monkeypatch):
    """Programs for many rows give the same. Inputs have few bits: other sums differ between shapes on some machines."""
    routing = Routing(70, 3, norm_topk_prob=True)
    x, router = torch.randint(-16, 17, (19, 140)).half() / 8, torch.randint(-16, 17, (70, 140)).half() / 64
    few = launch_route(x, router, None, None, routing)
    for wide in (32, 64):
        monkeypatch.setattr(route, "WIDER", ((8, wide),))
        many = launch_route(x, router, None, None, routing)
        assert all(torch.equal(one, other) for one, other in zip(few, many))


def test_a_router_in_float32_takes_half_precision_rows():
    routing = Routing(6, 2, norm_topk_prob=True)
    x, router = torch.randn(3, 140).half(), torch.randn(6, 140) / 8
    got, weights = launch_route(x, router, None, None, routing)
    want, weighed = route_reference(x, router, None, None, routing)
    assert torch.equal(got, want)
    torch.testing.assert_close(weights, weighed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("real", [0, 1, 3])
def test_padding_chooses_no_expert_and_reads_no_weight(tokens, real):
    """Rows of padding are NaN, and so are the matrices of all experts that no real row chose."""
    routing, width, depth = Routing(7, 3, norm_topk_prob=True), 24, 40
    count = torch.tensor([real], dtype=torch.int32)
    x, router = torch.randn(tokens, depth), torch.randn(7, depth) / 4
    x[real:] = math.nan
    chosen, weights = launch_route(x, router, None, None, routing, count)
    want, weighed = route_reference(x, router, None, None, routing, count)
    assert torch.equal(chosen, want)
    assert torch.equal(chosen[:real], route_reference(x[:real], router, None, None, routing)[0])
    torch.testing.assert_close(weights, weighed, rtol=1e-5, atol=1e-6)
    assert (chosen[real:] == 7).all()
    assert not weights[real:].any()
    pairs = launch_sort_pairs(chosen, 7)
    sorted_pairs = sort_pairs_reference(chosen, 7)
    assert torch.equal(pairs.ends.long(), sorted_pairs.ends)
    assert torch.equal(pairs.order[: 3 * real].long(), sorted_pairs.order[: 3 * real])
    gate_up, down = torch.randn(7, 2 * width, depth) / 8, torch.randn(7, depth, width) / 8
    unread = [expert for expert in range(7) if expert not in chosen[:real]]
    gate_up[unread], down[unread] = math.nan, math.nan
    shared, residual = torch.randn(tokens, depth), torch.randn(tokens, depth)
    for each in (pairs, Pairs(3, chosen, None, None)):
        tile = Tile(16, 32, 32, 2, 4)
        made = launch_grouped(x, gate_up, None, each, Activation.SILU, tile)
        made = launch_grouped(made, down, None, each, None, tile).view(tokens, 3, depth)
        got = launch_combine(made, weights, shared, None, residual.clone(), None, count)
        torch.testing.assert_close(got[real:], shared[real:] + residual[real:])
        torch.testing.assert_close(got, combine_reference(made, weights, shared, None, residual.clone(), None, count))
        assert not got.isnan().any()


@pytest.mark.parametrize(("first", "held"), [(0, 3), (3, 2), (5, 2)])
@pytest.mark.parametrize("few", [False, True])
def test_a_rank_multiplies_its_own_experts(first, held, few):
    """Experts are numbered from the rank's first on; rows of other ranks' experts are not written and add nothing."""
    routing, width, depth, rows = Routing(7, 3, norm_topk_prob=True, first=first), 24, 40, 6
    x, router, gain, count = torch.randn(rows, depth), torch.randn(7, depth) / 4, torch.ones(depth), torch.tensor([5])
    rest = None, None, routing, count.int()
    if few:
        x, chosen, weights, *_ = launch_route_rows(x, gain, 1e-5, router, *rest)
    else:
        chosen, weights = launch_route(x, router, *rest)
    want, weighed = route_reference(x, router, *rest)
    assert torch.equal(chosen, want)
    of_all, given = route_reference(x, router, None, None, replace(routing, first=0), count.int())
    assert torch.equal((chosen[:5] + first) % 7, of_all[:5])
    torch.testing.assert_close(weights, weighed, rtol=1e-5, atol=1e-6)
    gate_up, down = torch.randn(7, 2 * width, depth) / 8, torch.randn(7, depth, width) / 8
    own = slice(first, first + held)
    for each in (launch_sort_pairs(chosen, held), Pairs(3, chosen, None, None)):
        tile = Tile(16, 32, 32, 2, 4)
        made = launch_grouped(x, gate_up[own].contiguous(), None, each, Activation.SILU, tile)
        made = launch_grouped(made, down[own].contiguous(), None, each, None, tile).view(rows, 3, depth)
        got = launch_combine(made, weights, None, None, None, None, count.int(), chosen, held)
        torch.testing.assert_close(
            got, combine_reference(made, weights, None, None, None, None, count.int(), chosen, held)
        )
        for row in range(5):
            total = torch.zeros(depth)
            for expert, weight in zip(of_all[row].tolist(), given[row]):
                if first <= expert < first + held:
                    gate, up = (gate_up[expert] @ x[row]).chunk(2)
                    total += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
            torch.testing.assert_close(got[row], total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_the_experts_of_real_tokens_are_captured_at_their_places(dtype):
    """18 of the 21 rows are real, and one of the 18 has no place."""
    routing, rows, places = ROUTINGS["softmax"], 21, 40
    x, router = torch.randn(rows, 40), torch.randn(routing.num_experts, 40) / 4
    mapping = torch.randperm(places)[:rows]
    mapping[4] = -1
    count = torch.tensor([18], dtype=torch.int32)
    ids = torch.full((places, 3, routing.top_k), 77, dtype=dtype)
    kept = Capture(ids, mapping).layer(1)
    chosen, _ = launch_route(x, router, None, None, routing, count, kept)
    has = mapping[:18] >= 0
    want = torch.full_like(ids, 77)
    want[mapping[:18][has], 1] = chosen[:18][has].to(dtype)
    assert torch.equal(ids, want)


@pytest.mark.parametrize(("experts", "rows", "last"), [(5, 3, 1), (16, 700, 64), (40, 1, 0)])
def test_the_expert_load_of_pairs(experts, rows, last):
    choices, tops = torch.randint(0, experts, (3, 3000), dtype=torch.int32), torch.tensor([4, 2, 3], dtype=torch.int32)
    got, want = torch.full((3, 3), -1, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int32)
    arguments = (choices, tops, torch.tensor([rows], dtype=torch.int32), torch.tensor([last], dtype=torch.int32))
    launch_expert_load(got, *arguments, experts)
    expert_load_reference(want, *arguments, experts)
    assert torch.equal(got, want)


def test_choices_may_be_left_in_a_lasting_place():
    x, router, lasting = torch.randn(19, 40), torch.randn(6, 40), torch.full((64,), 9, dtype=torch.int32)
    got, weights = launch_route(x, router, None, None, Routing(6, 2), lasting=lasting)
    want, weighed = launch_route(x, router, None, None, Routing(6, 2))
    assert got.data_ptr() == lasting.data_ptr()
    assert torch.equal(got, want)
    assert torch.equal(weights, weighed)
    assert (lasting[38:] == 9).all()


@pytest.mark.parametrize("real", [0, 17])
def test_a_tile_of_padding_reads_no_router(real):
    """Tiles without real rows compute no product: they only write that the row has no expert."""
    routing, count = Routing(4, 2), torch.tensor([real], dtype=torch.int32)
    router = torch.randn(4, 40) if real else torch.full((4, 40), math.nan)
    chosen, weights = launch_route(torch.randn(33, 40), router, None, None, routing, count)
    assert (chosen[real:] == 4).all()
    assert (chosen[:real] < 4).all()
    assert not weights[real:].any()


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (5, 3, 7), (300, 4, 9), (1100, 4, 5)])
def test_sorted_pairs(tokens, top_k, experts):
    chosen = torch.rand(tokens, experts).argsort(1)[:, :top_k].to(torch.int32).contiguous()
    chosen[tokens // 2 :] = chosen[0].clone()
    got, want = launch_sort_pairs(chosen, experts), sort_pairs_reference(chosen, experts)
    assert torch.equal(got.order.long(), want.order)
    assert torch.equal(got.ends.long(), want.ends)


def drawn(tokens: int, top_k: int, experts: int, spread: str) -> Pairs:
    """Pairs of random experts; of the last experts only; or unsorted."""
    if spread == "one":
        chosen = torch.arange(experts - top_k, experts).expand(tokens, top_k).to(torch.int32).contiguous()
    else:
        chosen = torch.rand(tokens, experts).argsort(1)[:, :top_k].to(torch.int32).contiguous()
    return Pairs(top_k, chosen, None, None) if spread == "few" else launch_sort_pairs(chosen, experts)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", [None, Activation.SILU, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spread", ["even", "one", "few"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 3, 5), (9, 2, 6), (20, 1, 3)])
@pytest.mark.parametrize(("width", "depth"), [(64, 64), (50, 72)])
@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("of_tokens", [False, True])
def test_grouped_products(
    tokens, top_k, experts, width, depth, spread, biased, activation, dtype, block_m, weighed, of_tokens
):  # fmt: skip
    gated = activation is not None
    pairs = drawn(tokens, top_k, experts, spread)
    weight = (torch.randn(experts, width * (1 + gated), depth) / 8).to(dtype)
    bias = torch.randn(experts, width * (1 + gated)).to(dtype) if biased else None
    x = torch.randn(tokens if gated or of_tokens else pairs.count, depth).to(dtype)
    given = torch.rand(tokens, top_k) if weighed and gated else None
    got = launch_grouped(x, weight, bias, pairs, activation, Tile(block_m, 32, 32, 2, 4), given, of_tokens)
    assert error(got, grouped_reference(x, weight, bias, pairs, activation, given, of_tokens)) < (
        1e-6 if dtype == torch.float32 else 1e-3
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [None, *Activation])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spread", ["even", "one"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 3, 5), (9, 2, 6), (70, 3, 7)])
@pytest.mark.parametrize(("width", "depth"), [(64, 64), (50, 72), (144, 40)])
@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("of_tokens", [False, True])
def test_persistent_products(
    tokens, top_k, experts, width, depth, spread, biased, activation, block_m, weighed, of_tokens, monkeypatch
):  # fmt: skip
    """Two programs process all tiles. One token in four is padding with NaN rows."""
    monkeypatch.setattr(grouped_persistent, "target", lambda: Target("cuda", "sm_90", 2, 32, 0))
    gated = activation is not None
    chosen = drawn(tokens, top_k, experts, spread).chosen
    chosen[(tokens + 2) * 3 // 4 :] = experts
    pairs = launch_sort_pairs(chosen, experts)
    weight = (torch.randn(experts, width * (1 + gated), depth) / 8).half()
    bias = torch.randn(experts, width * (1 + gated)).half() if biased else None
    x = torch.randn(tokens if gated or of_tokens else pairs.count, depth).half()
    if gated or of_tokens:
        x[(tokens + 2) * 3 // 4 :] = math.nan
    else:
        x[int(pairs.ends[-1]) :] = math.nan
    given = torch.rand(tokens, top_k) if weighed and gated else None
    tile = Tile(block_m, 32, 32, 2, 4, persistent=True)
    got = launch_persistent(x, weight, bias, pairs, activation, tile, given, of_tokens)
    whole = sort_pairs_reference(chosen, experts)  # includes the places of padding, which the kernel leaves undefined
    want = grouped_reference(x.double(), weight.double(), bias, whole, activation, given, of_tokens)
    real = int(pairs.ends[-1])
    kept = torch.arange(real) if gated or of_tokens else pairs.order[:real].long()
    assert error(got[kept], want[kept]) < 1e-3


def test_persistent_products_of_no_pairs():
    pairs = Pairs(2, torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0), torch.zeros(3, dtype=torch.int32))
    tile = Tile(16, 32, 32, 2, 4, persistent=True)
    got = launch_persistent(torch.empty(0, 16).half(), torch.randn(3, 8, 16).half(), None, pairs, None, tile)
    assert got.shape == (0, 8)


@pytest.mark.parametrize(("tokens", "gated", "biased", "turned"), [
    (1, True, False, False), (9, True, True, True), (9, False, False, False),
])  # fmt: skip
def test_experts_of_transformers_modules(tokens, gated, biased, turned, monkeypatch):
    monkeypatch.setattr(backend, "target", lambda: Target("cuda", "sm_90", 132, 32, 64 << 10))
    count, hidden, width = 5, 48, 40
    shapes = {"gate_up_proj" if gated else "up_proj": (width * (1 + gated), hidden), "down_proj": (hidden, width)}
    module = SimpleNamespace(
        num_experts=count, has_gate=gated, has_bias=biased, is_transposed=turned,
        act_fn=torch.tanh, _apply_gate=lambda both: both[:, :width] * both[:, width:].sigmoid(),
    )  # fmt: skip
    if turned:  # the layout of transformers since 5.20
        module.has_post_expert_norm, module.post_expert_norm = True, torch.tanh
    upright = {name: torch.randn(count, *shape) / 8 for name, shape in shapes.items()}
    biases = {name: torch.randn(count, shape[0]) for name, shape in shapes.items()}
    for name, matrices in upright.items():
        setattr(module, name, matrices.transpose(1, 2).contiguous() if turned else matrices)
        setattr(module, f"{name}_bias", biases[name])
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    chosen = torch.rand(tokens, count).argsort(1)[:, :2]
    want = torch.zeros(tokens, hidden)
    for token, slot in itertools.product(range(tokens), range(2)):
        row = x[token]
        for number, name in enumerate(shapes):
            expert = int(chosen[token, slot])
            row = upright[name][expert] @ row + (biases[name][expert] if biased else 0)
            if number == 0:
                row = module._apply_gate(row[None])[0] if gated else row.tanh()
        row = row.tanh() if turned else row
        want[token] += weights[token, slot] * row
    assert error(backend.experts_on_device(module, x, chosen, weights), want) < 1e-5
    # The walk (precompile) launches nothing, so the order of pairs is uninitialised memory.
    held = Pairs(2, chosen.int(), torch.full((2 * tokens,), 1 << 30), torch.full((count,), 1 << 30))
    monkeypatch.setattr(backend, "pairs_of", lambda *_, **__: held)
    monkeypatch.setattr(backend, "launch_grouped", lambda x, weight, *_, **__: x.new_zeros(2 * tokens, weight.shape[1]))
    assert backend.experts_on_device(module, x, chosen, weights).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", ["none", "added", "gated"])
@pytest.mark.parametrize(("rows", "top_k", "width"), [(1, 1, 30), (5, 6, 64), (3, 2, 700)])
def test_combined_rows(rows, top_k, width, shared, dtype):
    made, weights = torch.randn(rows, top_k, width).to(dtype), torch.rand(rows, top_k)
    beside = None if shared == "none" else torch.randn(rows, width).to(dtype)
    gate = torch.randn(rows, 1).to(dtype) if shared == "gated" else None
    # The result is rounded twice, and the interpreter truncates digits.
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    for given in (None, weights):
        got = launch_combine(made, given, beside, gate, None, None)
        assert error(got, combine_reference(made, given, beside, gate, None, None)) < limit
    residual, gain = torch.randn(rows, width).to(dtype), torch.randn(width)
    added, wanted = residual.clone(), residual.clone()
    after, wished = (empty_unscaled(residual, BLOCK, gain, 1e-6) for _ in range(2))
    assert launch_combine(made, weights, beside, gate, added, after) is added
    combine_reference(made, weights, beside, gate, wanted, wished)
    assert error(added, wanted) < limit
    assert error(after.rows, wished.rows) < limit
    assert error(after.squares.sum(0), wished.squares.sum(0)) < limit
