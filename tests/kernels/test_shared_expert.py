"""A shared expert in the launches of the chosen experts: what is launched, when, and how a layer uses the results."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.activation import Activation, activate_reference
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.float8_weight import Float8Weight, pack_float8
from engine.kernels.gemm.quantise_floats import CodedRows, quantise_floats
from engine.kernels.gemm.scaled import ScaledProducts
from engine.kernels.moe import float8_weight
from engine.kernels.moe.float8 import float8_experts_reference, pack_float8_experts
from engine.kernels.moe.float8_weight import Float8Experts
from engine.kernels.moe.grouped import Tile
from engine.kernels.moe.panels import ExpertPanels
from engine.kernels.moe.sort import Pairs
from engine.layers.adapted import AdaptedWeight
from engine.layers.adapted_experts import AdaptedExperts
from engine.layers.placed import PlacedExperts, PlacedSite
from engine.models.registry import load_model_config
from tests import tiny
from tests.models.harness import Harness, load

GROUPS, EXPERTS, HIDDEN, WIDTH = Inputs(kind=Kind.E4M3, group=128), 4, 256, 128


def codes_of(rows: int, columns: int, inputs: Inputs = GROUPS) -> Codes:
    """FP8 with scales of blocks."""
    scale = (torch.rand(rows // 128, columns // 128) / 64).repeat_interleave(128, 0)
    return Codes(Kind.E4M3, torch.randint(0, 0x60, (rows, columns)).to(torch.uint8), scale, 128, inputs=inputs)


def alone(rows: int, columns: int, inputs: Inputs = GROUPS) -> Float8Weight:
    return pack_float8(codes_of(rows, columns, inputs), None, torch.float32, ScaledProducts(), False)


def experts(rows: int, columns: int) -> Float8Experts:
    weight = pack_float8_experts(codes_of(EXPERTS * rows, columns), rows)
    return Float8Experts(weight, GROUPS, EXPERTS, None, torch.float32, False)


@pytest.fixture
def launched(monkeypatch):
    """Replaces the kernel by its reference; the pairs of each launch, those of the shared expert included."""
    found: list[int] = []

    def launch(x, weight, count, bias, pairs, activation, weights, blocks, inputs, dtype, shared):
        rows = x if isinstance(x, CodedRows) else quantise_floats(x, inputs)
        tokens = len(pairs.chosen)
        own = Pairs(1, torch.zeros(tokens, 1, dtype=torch.int32), None, None)
        last = rows if activation is not None else CodedRows(rows.codes[-tokens:], rows.scales[:, -tokens:])
        first = rows if activation is not None else CodedRows(rows.codes[:-tokens], rows.scales[:, :-tokens])
        rest = activation, Tile(16, 128, 128, 2, 4), dtype
        made = torch.cat([
            float8_experts_reference(first, weight, count, bias, pairs, *rest),
            float8_experts_reference(last, shared, 1, bias, own, *rest),
        ])  # fmt: skip
        found.append(len(made))
        return made

    monkeypatch.setattr(float8_weight, "launch_pairs_float8", launch)
    return found


def test_both_products_of_all_are_two_launches(launched):
    torch.manual_seed(0)
    first, second = experts(2 * WIDTH, HIDDEN), experts(HIDDEN, WIDTH)
    shared = alone(2 * WIDTH, HIDDEN), alone(HIDDEN, WIDTH)
    x, chosen = torch.randn(3, HIDDEN), torch.tensor([[0, 2], [3, 1], [2, 3]], dtype=torch.int32)
    both = first.of_mlp_and_shared(second, shared, x, None, Pairs(2, chosen, None, None), Activation.SILU)
    assert both is not None
    assert launched == [9, 9]
    made, own = both
    want = shared[1].linear(activate_reference(shared[0].linear(x), Activation.SILU))
    torch.testing.assert_close(own, want)
    pairs = first.pairs(chosen)
    torch.testing.assert_close(made, first.of_mlp(second, x, None, pairs, Activation.SILU, None))
    assert first.of_mlp_and_shared(second, shared, x, None, pairs, Activation.SILU) is None, "sorted pairs"


def test_a_shared_expert_of_another_size_or_form_is_not_taken(launched):
    first, second = experts(2 * WIDTH, HIDDEN), experts(HIDDEN, WIDTH)
    pairs = Pairs(1, torch.zeros(1, 1, dtype=torch.int32), None, None)
    wide, powers = (4 * WIDTH, HIDDEN), Inputs(kind=Kind.E4M3, group=128, powers=True)
    for shared in (
        (alone(*wide), alone(HIDDEN, 2 * WIDTH)),
        (alone(2 * WIDTH, HIDDEN, powers), alone(HIDDEN, WIDTH, powers)),
        (AdaptedWeight(alone(2 * WIDTH, HIDDEN), object.__new__(PlacedSite)), alone(HIDDEN, WIDTH)),
    ):
        assert first.of_mlp_and_shared(second, shared, torch.randn(1, HIDDEN), None, pairs, Activation.SILU) is None
    assert launched == []


@pytest.mark.parametrize("apart", [False, True])
def test_with_places_for_adapters_rows_without_one_have_the_same_launches(apart, launched, monkeypatch):
    monkeypatch.setattr(PlacedExperts, "apart", apart)
    monkeypatch.setattr(PlacedSite, "apart", apart)
    first, second = (
        AdaptedExperts(each, object.__new__(PlacedExperts))
        for each in (experts(2 * WIDTH, HIDDEN), experts(HIDDEN, WIDTH))
    )
    weights = [
        AdaptedWeight(each, object.__new__(PlacedSite)).plain
        for each in (alone(2 * WIDTH, HIDDEN), alone(HIDDEN, WIDTH))
    ]
    assert [each is None for each in weights] == [apart] * 2
    shared = weights if not apart else (alone(2 * WIDTH, HIDDEN), alone(HIDDEN, WIDTH))
    pairs = Pairs(1, torch.zeros(1, 1, dtype=torch.int32), None, None)
    made = first.of_mlp_and_shared(second, tuple(shared), torch.randn(1, HIDDEN), None, pairs, Activation.SILU)
    assert (made is None) == apart
    assert len(launched) == 2 * (not apart)


def test_a_layer_takes_the_shared_expert_from_the_experts_launches(tmp_path, monkeypatch):
    """Its gate and the sum are as before; a form without such launches multiplies it itself."""
    made = tiny.causal(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
        shared_expert_intermediate_size=44, num_hidden_layers=2, mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip
    folder = tiny.save(made(), tmp_path / "model")
    assert load_model_config(folder).text.layers[0].experts.shared_gate
    tokens, found = list(range(3, 20)), []

    def together(self, down, shared, x, codes, pairs, activation):
        found.append(len(x))
        own = shared[1].linear(shared[0].gated(x, activation))
        return self.of_mlp(down, x, codes, pairs, activation, None), own

    harness = Harness(load(folder))
    want = harness.prefill(harness.add(tokens))
    monkeypatch.setattr(ExpertPanels, "of_mlp_and_shared", together)
    harness = Harness(load(folder))
    assert torch.equal(harness.prefill(harness.add(tokens)), want)
    assert found == [len(tokens)] * 2
