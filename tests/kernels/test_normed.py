"""A norm between two products is left to them where they can do it, and gives what a norm of its own gives."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.gemm import dense
from engine.kernels.gemm.dense import add_linear, linear, normed_linear, pack, pack_gated, pack_plain, set_invariant
from engine.kernels.gemm.split_k import Split, split_linear
from engine.kernels.norm import rms_norm_reference

CUT = Split(16, 32, 2, 2, 4)
EPS = 1e-6


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """What kernels/tune was asked for; it answers CUT."""
    questions: list[tuple] = []
    monkeypatch.setattr(dense, "few_rows", lambda *given: questions.append(given) or CUT)
    return questions


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "vendor", "split", "invariant"])
def test_a_norm_between_two_products(kind, gated, biased, asked, monkeypatch):
    first, second = torch.randn(40, 60).bfloat16(), torch.randn(48, 40).bfloat16()
    biases = [torch.randn(len(weight)).bfloat16() if biased else None for weight in (first, second)]
    x, start, gain = torch.randn(5, 60).bfloat16(), torch.randn(5, 40).bfloat16() * 30, torch.randn(40)
    if kind == "vendor":
        monkeypatch.setattr(dense, "few_rows", lambda *given: None)
    set_invariant(kind == "invariant")
    if kind != "cpu":
        packed, then = pack_plain(first, biases[0], gated=False), pack_plain(second, biases[1], gated)
    elif gated:
        halves = (None, None) if biases[1] is None else biases[1].chunk(2)
        packed, then = pack(first, biases[0]), pack_gated(*second.chunk(2), *halves)
    else:
        packed, then = pack(first, biases[0]), pack(second, biases[1])
    set_invariant(False)

    def product(rows: torch.Tensor, number: int) -> torch.Tensor:
        bias = biases[number]
        return torch.nn.functional.linear(
            rows, (first, second)[number].double(), None if bias is None else bias.double()
        )

    residual = start.clone()
    ahead = add_linear(residual, x, packed, gain, EPS)
    torch.testing.assert_close(residual.double(), start.double() + product(x.double(), 0), rtol=2e-2, atol=0.1)
    want = product(rms_norm_reference(residual.double(), gain.double(), EPS), 1)
    if gated:
        gate, up = want.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
    got = normed_linear(residual, gain, EPS, ahead, then).double()
    assert float((got - want).norm() / want.norm()) < 1e-2
    assert (ahead is not None) == (kind == "split")
    if ahead is not None:
        assert asked == [(5, 40, 60, False), (5, 24 if gated else 48, 40, gated)]
        # All but the root is done: the residual itself is not read again.
        nothing = torch.full_like(residual, torch.nan)
        assert torch.equal(normed_linear(nothing, gain, EPS, ahead, then).double(), got)


def test_rows_of_float16_are_left_to_the_norm(asked):
    """Times the gain they could leave its range."""
    packed = pack_plain(torch.randn(40, 60).half(), None, gated=False)
    residual = torch.randn(5, 40).half()
    assert add_linear(residual, torch.randn(5, 60).half(), packed, torch.ones(40), EPS) is None
    assert asked == [(5, 40, 60, False)]


def test_rows_go_to_a_cut_in_tiles_only_where_each_begins_at_whole_16_bytes(monkeypatch):
    launched = []
    monkeypatch.setattr(dense, "few_rows", lambda *_given: CUT._replace(block_m=64))
    monkeypatch.setattr(dense, "split_linear", lambda *given: launched.append(given[6]) or split_linear(*given))
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(70, 72).bfloat16()
    for first, taken in ((0, True), (8, True), (1, False)):
        rows = x[:, first : first + 64]
        got = linear(rows, pack_plain(weight, None, gated=False))
        assert float((got.double() - rows.double() @ weight.double().T).norm() / got.double().norm()) < 1e-2
        assert len(launched) == taken
        launched.clear()
    odd = pack_plain(torch.randn(40, 60).bfloat16(), None, gated=False)  # rows of 120 bytes
    linear(x[:, :60], odd)
    assert not launched
