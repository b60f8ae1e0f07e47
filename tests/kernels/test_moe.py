"""Routing against a slow float64 version of its rules; an expert row's bits depend on no other row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine.base.model_config import ExpertsConfig, Routing
from engine.kernels.activation import Activation
from engine.kernels.gemm.pack import Placement
from engine.kernels.moe.combine import combine_reference
from engine.kernels.moe.route import choose_experts, route
from engine.kernels.moe.sort import sort_pairs
from engine.layers.moe import SparseMLP
from engine.layers.norm import Normed
from engine.models.registry import load_model_config
from tests import tiny
from tests.kernels.routings import ROUTINGS, scales_of


def slowly_near(logits, routing):
    """Chooses experts one after the other; the weights use the remaining logits near the highest one."""
    chosen, weights = [], []
    for _ in range(routing.top_k):
        left = [expert for expert in range(routing.num_experts) if expert not in chosen]
        best = max(left, key=lambda expert: logits[expert])
        top = logits[best]
        sizes = {expert: max(abs(logits[expert]), top) for expert in left}
        near = [each for each in left if not sizes[each] or (top - logits[each]) / sizes[each] <= routing.nearness]
        chosen.append(best)
        weights.append(1 / sum(math.exp(logits[each] - top) for each in near))
    return chosen, weights


def slowly(
    logits: list[float], correction: list[float], routing: Routing, scales: list[float] | None = None
) -> tuple[list[int], list[float]]:
    """The routing of one token, as the documentation of Routing defines it."""
    if routing.score == "near":
        return slowly_near(logits, routing)
    if routing.score == "softmax":
        top = max(logits)
        powers = [math.exp(value - top) for value in logits]
        scores = [power / sum(powers) for power in powers]
    else:
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    ranks = [score + more for score, more in zip(scores, correction)]
    size = routing.num_experts // routing.n_group
    groups = [ranks[first : first + size] for first in range(0, routing.num_experts, size)]
    how_many = 1 if routing.group_rank == "maximum" else 2
    of_group = [sum(sorted(group)[-how_many:]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda group: (-of_group[group], group))[: routing.topk_group]
    allowed = [expert for expert in range(routing.num_experts) if expert // size in kept]
    chosen = sorted(allowed, key=lambda expert: (-ranks[expert], expert))[: routing.top_k]
    weights = [scores[expert] for expert in chosen]
    if routing.norm_topk_prob:
        total = max(sum(weights) + routing.eps, routing.least_sum)
        weights = [weight / total for weight in weights]
    scales = scales or [1.0] * routing.num_experts
    return chosen, [weight * routing.scale * scales[expert] for weight, expert in zip(weights, chosen)]


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("kind", ["spread", "ties", "equal"])
def test_choices_follow_the_rules(name, kind):
    routing = ROUTINGS[name]
    torch.manual_seed(len(name))
    logits = torch.randn(31, routing.num_experts)
    correction = torch.randn(routing.num_experts) if routing.correction else None
    if kind == "ties":  # few values, each several times
        logits = logits.round()
        correction = None if correction is None else torch.zeros_like(correction)
    elif kind == "equal":
        logits.zero_()
    scales = scales_of(routing)
    chosen, weights = choose_experts(logits, correction, routing, scales)
    assert chosen.dtype == torch.int32
    assert weights.dtype == torch.float32
    added = [0.0] * routing.num_experts if correction is None else correction.tolist()
    for row, experts, given in zip(logits.tolist(), chosen.tolist(), weights.tolist()):
        wanted, weighed = slowly(row, added, routing, None if scales is None else scales.tolist())
        assert experts == wanted
        assert given == pytest.approx(weighed, rel=1e-5)


BROKEN = [(name, math.nan) for name in ROUTINGS]
BROKEN += [(name, math.inf) for name, routing in ROUTINGS.items() if routing.score == "softmax"]


@pytest.mark.parametrize(("name", "bad"), BROKEN)
def test_a_broken_token_chooses_the_first_experts_and_changes_no_other(name, bad):
    routing = ROUTINGS[name]
    logits = torch.randn(5, routing.num_experts)
    correction = torch.randn(routing.num_experts) if routing.correction else None
    scales = scales_of(routing)
    whole, weighed = choose_experts(logits, correction, routing, scales)
    logits[2, -1] = bad
    chosen, weights = choose_experts(logits, correction, routing, scales)
    assert chosen[2].tolist() == list(range(routing.top_k))
    assert weights[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(chosen[others], whole[others])
    assert torch.equal(weights[others], weighed[others])


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_choice_does_not_depend_on_company(name):
    routing = ROUTINGS[name]
    logits = torch.randn(257, routing.num_experts)
    correction = torch.randn(routing.num_experts) if routing.correction else None
    scales = scales_of(routing)
    whole = choose_experts(logits, correction, routing, scales)
    for rows in (1, 2, 31):
        for got, want in zip(choose_experts(logits[-rows:], correction, routing, scales), whole):
            assert torch.equal(got, want[-rows:])


def test_pairs_of_an_expert_lie_side_by_side():
    chosen = torch.tensor([[3, 0], [0, 3], [5, 0]], dtype=torch.int32)
    pairs = sort_pairs(chosen, 6)
    assert pairs.order.tolist() == [1, 2, 5, 0, 3, 4]
    assert pairs.ends.tolist() == [3, 3, 3, 5, 5, 6]


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe"])
def layer(request):
    text = load_model_config(tiny.checkpoint(request.param)).text
    config = next(layer.experts for layer in text.layers if layer.experts)
    return text, config


def filled(
    text, config: ExpertsConfig, dtype: torch.dtype, saved: torch.dtype = torch.float32, layer: SparseMLP | None = None
) -> SparseMLP:
    """A layer with random weights."""
    torch.manual_seed(3)
    made = layer or SparseMLP(text, config)
    parts = [made.router, made.gate_up, made.down]
    if made.shared is not None:
        parts += [made.shared.gate_up, made.shared.down, made.shared_gate]
    for part in parts:
        drawn = {
            kind: [torch.randn(piece.shape).to(saved) * 0.2 for piece in pieces]
            for kind, pieces in part.expects().items()
        }
        part.fill(drawn, Placement(dtype, "cpu"))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 31, 257])
def test_a_row_has_the_same_bits_in_any_company(layer, dtype, rows):
    text, config = layer
    mlp = filled(text, config, dtype)
    x = torch.randn(257, text.hidden_size).to(dtype)
    x[100:] = x[100]  # many rows choose the same experts
    whole = mlp(Normed(None, x)).value()
    assert torch.equal(mlp(Normed(None, x[:rows])).value(), whole[:rows])
    residual = torch.randn(rows, text.hidden_size).to(dtype)
    added = residual.clone()
    mlp(Normed(None, x[:rows])).add_to(added)
    assert (added.float() - residual.float() - whole[:rows].float()).abs().max() < (
        1e-5 if dtype == torch.float32 else 0.1
    )


def test_a_layer_computes_the_experts_of_each_row(layer):
    text, config = layer
    mlp = filled(text, config, torch.float32)
    x = torch.randn(9, text.hidden_size)
    got = mlp(Normed(None, x)).value()
    for row, made in zip(x.double(), got):
        logits = row @ mlp.router.weight.dense().double().T
        chosen, weights = slowly(logits.tolist(), [0.0] * config.routing.num_experts, config.routing)
        want = torch.zeros(text.hidden_size, dtype=torch.float64)
        for expert, weight in zip(chosen, weights):
            gate, up = (mlp.gate_up.weight.dense(expert).double() @ row).chunk(2)
            want += weight * (mlp.down.weight.dense(expert).double() @ (torch.nn.functional.silu(gate) * up))
        if mlp.shared is not None:
            gate, up = (mlp.shared.gate_up.weight.dense().double() @ row).chunk(2)
            shared = mlp.shared.down.weight.dense().double() @ (torch.nn.functional.silu(gate) * up)
            want += shared * torch.sigmoid(mlp.shared_gate.weight.dense().double() @ row)
        torch.testing.assert_close(made.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_reads_its_input_times_its_weight(layer, dtype):
    text, config = layer
    config = replace(config, routing=replace(config.routing, score="sigmoid", weigh_input=True, expert_scale=True))
    mlp = SparseMLP(text, config)
    x, scales = torch.randn(9, text.hidden_size).to(dtype), torch.rand(config.routing.num_experts) + 0.5
    mlp.expert_scale.fill({"per_expert_scale": [scales]}, Placement(dtype, "cpu"))
    filled(text, config, dtype, layer=mlp)
    got = mlp(Normed(None, x)).value()
    assert torch.equal(mlp(Normed(None, x[4:5])).value(), got[4:5])
    chosen, weights = route(x, mlp.router.weight, None, config.routing, None, None, scales)
    for row, experts, given, made in zip(x.double(), chosen.tolist(), weights.double(), got):
        want = torch.zeros(text.hidden_size, dtype=torch.float64)
        for expert, weight in zip(experts, given):
            gate, up = (mlp.gate_up.weight.dense(expert).double() @ (row * weight)).chunk(2)
            want += mlp.down.weight.dense(expert).double() @ (torch.nn.functional.silu(gate) * up)
        if mlp.shared is not None:
            shared = mlp.shared.of_rows(row[None].to(dtype)).double()
            want += (shared * mlp.shared_gate(row[None].to(dtype)).double().sigmoid())[0]
        assert (made.double() - want).norm() < (1e-5 if dtype == torch.float32 else 0.03) * want.norm()


def test_one_tensor_of_all_experts_is_a_tensor_of_each(layer):
    text, config = layer
    apart, joined = SparseMLP(text, config), SparseMLP(text, replace(config, layout="joined"))
    size = (config.routing.num_experts, 2 * config.width, text.hidden_size)
    assert joined.gate_up.expects()["weight"][0].shape == size
    both = torch.randn(size)
    each = [half for matrix in both for half in matrix.chunk(2)]
    assert [piece.shape for piece in apart.gate_up.expects()["weight"]] == [piece.shape for piece in each]
    placement = Placement(torch.float32, "cpu")
    apart.gate_up.fill({"weight": each}, placement)
    joined.gate_up.fill({"weight": [both]}, placement)
    for expert in range(config.routing.num_experts):
        assert torch.equal(apart.gate_up.weight.dense(expert), both[expert])
        assert torch.equal(joined.gate_up.weight.dense(expert), both[expert])


def test_transposed_interleaved_experts_are_those_of_each_with_biases(layer):
    text, config = layer
    count, width, hidden = config.routing.num_experts, config.width, text.hidden_size
    mlp = SparseMLP(text, replace(config, layout="by turns"))
    wanted = {kind: pieces[0].shape for kind, pieces in mlp.gate_up.expects().items()}
    assert wanted == {"gate_up_proj": (count, hidden, 2 * width), "gate_up_proj_bias": (count, 2 * width)}
    both, bias = torch.randn(count, hidden, 2 * width), torch.randn(count, 2 * width)
    down, down_bias = torch.randn(count, width, hidden), torch.randn(count, hidden)
    placement = Placement(torch.float32, "cpu")
    mlp.gate_up.fill({"gate_up_proj": [both], "gate_up_proj_bias": [bias]}, placement)
    mlp.down.fill({"down_proj": [down], "down_proj_bias": [down_bias]}, placement)
    x, chosen = torch.randn(count, hidden), torch.arange(count, dtype=torch.int32)[:, None]
    pairs = mlp.gate_up.weight.pairs(chosen)
    made = mlp.gate_up.weight.of_tokens(x, pairs, Activation.CLAMPED_SWIGLU)
    raw = (x[:, None] @ both)[:, 0] + bias
    gate, up = raw[:, 0::2].clamp(max=7), raw[:, 1::2].clamp(-7, 7)
    want = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
    got = mlp.down.weight.of_pairs(made, pairs)[:, 0]
    torch.testing.assert_close(got, (want[:, None] @ down)[:, 0] + down_bias, rtol=1e-4, atol=1e-4)


def test_a_router_of_bfloat16_chooses_as_float64_does(layer):
    """Compares rows in which the last chosen expert and the next one differ by more than 1e-5."""
    text, config = layer
    mlp = filled(text, config, torch.bfloat16, saved=torch.bfloat16)
    x = torch.randn(200, text.hidden_size).to(torch.bfloat16)
    logits = x.double() @ mlp.router.weight.dense().double().T
    scores = logits.softmax(-1).sort(dim=-1, descending=True)
    k = config.routing.top_k
    clear = (scores.values[:, :k] - scores.values[:, 1 : k + 1]).amin(1) > 1e-5
    assert clear.sum() > 150
    chosen, _ = route(x, mlp.router.weight, None, config.routing)
    assert torch.equal(chosen[clear].long(), scores.indices[clear, :k])


def test_combining_a_shared_result_and_a_residual():
    made, weights, shared = torch.randn(4, 3, 8), torch.rand(4, 3), torch.randn(4, 8)
    gate, residual = torch.randn(4, 1), torch.randn(4, 8)
    want = (made * weights[..., None]).sum(1)
    torch.testing.assert_close(combine_reference(made, weights, None, None, None, None), want)
    torch.testing.assert_close(combine_reference(made, weights, shared, None, None, None), want + shared)
    want = want + shared * gate.sigmoid() + residual
    torch.testing.assert_close(combine_reference(made, weights, shared, gate, residual, None), want)
    torch.testing.assert_close(residual, want)
