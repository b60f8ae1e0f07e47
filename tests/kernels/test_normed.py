"""A norm between two products is fused into products that support it; the result equals that of a separate norm."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.kernels.activation import Activation
from engine.kernels.gemm import dense_row, dispatch, split_k
from engine.kernels.gemm.dense_row import RowCut, dense_row_reference
from engine.kernels.gemm.pack import Placement, pack_unchanged
from engine.kernels.gemm.panels import pack_paired, pack_panels
from engine.kernels.gemm.split_k import Split, split_linear_reference
from engine.kernels.norm import rms_norm_reference
from engine.kernels.target import Target
from engine.kernels.tune import ONE_ROW, choose_for_one_row

CUT = Split(16, 32, 2, 2, 4)
EPS = 1e-6


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """The questions to kernels/tune, which answers CUT."""
    questions: list[tuple] = []
    monkeypatch.setattr(dispatch, "few_rows", lambda *given: questions.append(given) or CUT)
    return questions


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "vendor", "split", "invariant"])
def test_a_norm_between_two_products(kind, gated, biased, asked, monkeypatch):
    first, second = torch.randn(40, 60).bfloat16(), torch.randn(48, 40).bfloat16()
    biases = [torch.randn(len(weight)).bfloat16() if biased else None for weight in (first, second)]
    x, start, gain = torch.randn(5, 60).bfloat16(), torch.randn(5, 40).bfloat16() * 30, torch.randn(40)
    if kind == "vendor":
        monkeypatch.setattr(dispatch, "few_rows", lambda *given: None)
    activation = Activation.SILU if gated else None
    if kind != "cpu":
        placement = Placement(torch.bfloat16, "cuda", kind == "invariant")
        packed, then = (pack_unchanged(*given, placement) for given in ((first, biases[0]), (second, biases[1])))
    elif gated:
        halves = None if biases[1] is None else torch.stack(biases[1].chunk(2))
        packed, then = pack_panels(first, biases[0]), pack_paired(torch.stack(second.chunk(2)), halves)
    else:
        packed, then = pack_panels(first, biases[0]), pack_panels(second, biases[1])

    def product(rows: torch.Tensor, number: int) -> torch.Tensor:
        bias = biases[number]
        return torch.nn.functional.linear(
            rows, (first, second)[number].double(), None if bias is None else bias.double()
        )

    residual = start.clone()
    prescaled = packed.add_then_norm(residual, x, gain, EPS)
    torch.testing.assert_close(residual.double(), start.double() + product(x.double(), 0), rtol=2e-2, atol=0.1)
    want = product(rms_norm_reference(residual.double(), gain.double(), EPS), 1)
    if gated:
        gate, up = want.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
    got = then.of_normed(residual, gain, EPS, prescaled, activation).double()
    assert float((got - want).norm() / want.norm()) < 1e-2
    assert (prescaled is not None) == (kind == "split")
    if prescaled is not None:
        assert asked == [(5, 40, 60, False), (5, 24 if gated else 48, 40, gated)]
        # Only the division by the root remains: the residual itself is not read again.
        nothing = torch.full_like(residual, torch.nan)
        assert torch.equal(then.of_normed(nothing, gain, EPS, prescaled, activation).double(), got)


@pytest.mark.parametrize("gated", [False, True])
def test_one_row_needs_no_matrix_units(gated, asked, monkeypatch):
    """The dense row kernel runs if kernels/tune has a cut; unaligned rows (16 bytes) use another kernel."""
    launched, cuts, activation = [], iter((RowCut(8, 16, 1), RowCut(2, 32, 1))), Activation.SILU if gated else None
    monkeypatch.setattr(dispatch, "one_row", lambda *given: asked.append(given) or next(cuts))
    monkeypatch.setattr(
        dense_row, "dense_row_reference", lambda *given: launched.append(given[6]) or dense_row_reference(*given)
    )
    first, second = torch.randn(40, 64).bfloat16(), torch.randn(48, 40).bfloat16()
    packed, then = (pack_unchanged(each, None, Placement(torch.bfloat16, "cuda")) for each in (first, second))
    x, residual, gain = torch.randn(1, 64).bfloat16(), torch.randn(1, 40).bfloat16(), torch.rand(40)
    prescaled = packed.add_then_norm(residual, x, gain, EPS)
    assert prescaled is not None
    assert len(prescaled.squares) == 5
    got = then.of_normed(residual, gain, EPS, prescaled, activation)
    want = rms_norm_reference(residual.double(), gain.double(), EPS) @ second.double().T
    if gated:
        gate, up = want.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
    assert float((got - want).norm() / want.norm()) < 1e-2
    assert asked == [(40, 64, False), (24 if gated else 48, 40, gated)]
    assert launched == [RowCut(8, 16, 1), RowCut(2, 32, 1)]
    packed.linear(torch.randn(2, 65).bfloat16()[1:, :64])
    assert asked[2:] == [(1, 40, 64, False)]


def test_small_weights_without_an_entry_take_one_row_by_a_rule():
    h100 = Target("cuda", "sm_90", 132, 32, 227 << 10)
    assert choose_for_one_row(h100, 2880, 4096, False) == ONE_ROW["sm_90"][2880, 4096, False]
    assert choose_for_one_row(h100, 4096, 2048, False) == RowCut(4, 256, 1)
    assert choose_for_one_row(h100, 8960, 1536, True) == RowCut(2, 512, 2)
    for shape in ((4096, 4096, False), (2048, 8192, False), (11008, 2048, True), (151936, 1024, False)):
        assert choose_for_one_row(h100, *shape) is None
    assert choose_for_one_row(dataclasses.replace(h100, arch="sm_100"), 2880, 4096, False) is None


def test_rows_of_float16_are_left_to_the_norm(asked):
    """Float16 rows times the gain could overflow."""
    packed = pack_unchanged(torch.randn(40, 60).half(), None, Placement(torch.float16, "cuda"))
    residual = torch.randn(5, 40).half()
    assert packed.add_then_norm(residual, torch.randn(5, 60).half(), torch.ones(40), EPS) is None
    assert asked == [(5, 40, 60, False)]


def test_rows_go_to_a_cut_in_tiles_only_where_each_begins_at_whole_16_bytes(monkeypatch):
    launched, placement = [], Placement(torch.bfloat16, "cuda")
    monkeypatch.setattr(dispatch, "few_rows", lambda *_given: CUT._replace(block_m=64))
    monkeypatch.setattr(
        split_k, "split_linear_reference", lambda *given: launched.append(given[6]) or split_linear_reference(*given)
    )
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(70, 72).bfloat16()
    for first, taken in ((0, True), (8, True), (1, False)):
        rows = x[:, first : first + 64]
        got = pack_unchanged(weight, None, placement).linear(rows)
        assert float((got.double() - rows.double() @ weight.double().T).norm() / got.double().norm()) < 1e-2
        assert len(launched) == taken
        launched.clear()
    odd = pack_unchanged(torch.randn(40, 60).bfloat16(), None, placement)  # rows of 120 bytes
    odd.linear(x[:, :60])
    assert not launched
