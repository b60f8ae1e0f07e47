"""The order of launches of adapted experts: A x comes behind a product of experts that lets it run meanwhile."""

import pytest
import torch

from engine.kernels.activation import Activation
from engine.kernels.moe.panels import ExpertPanels
from engine.kernels.moe.sort import Pairs
from engine.layers.adapted_experts import AdaptedExperts
from engine.layers.placed import PlacedExperts


@pytest.mark.parametrize("lets", [True, False])
def test_the_first_half_comes_behind_a_product_that_lets_it_start(lets, monkeypatch):
    order, low = [], torch.ones(2, 1)
    monkeypatch.setattr(ExpertPanels, "lets_start", lambda *_: lets)
    monkeypatch.setattr(ExpertPanels, "halves", lambda _, x, __: order.append("halves") or x)
    monkeypatch.setattr(ExpertPanels, "of_pairs", lambda _, rows, __: rows)
    monkeypatch.setattr(PlacedExperts, "acts", True)

    def lowered(_, x, pairs, during=False):
        order.append(("low", during))
        return low

    def gated(_, halves, x, found, pairs, activation, down):
        assert found is low
        return halves, None

    monkeypatch.setattr(PlacedExperts, "lowered", lowered)
    monkeypatch.setattr(PlacedExperts, "gated", gated)
    base, site = object.__new__(ExpertPanels), object.__new__(PlacedExperts)
    layer = AdaptedExperts(base, site)
    pairs = Pairs(2, torch.tensor([[0, 1]], dtype=torch.int32), None, None)
    layer.apart(layer, torch.ones(2, 4), pairs, Activation.SILU, None, gated=True)
    assert order == (["halves", ("low", True)] if lets else [("low", False), "halves"])
