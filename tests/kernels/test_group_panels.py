"""Quantised weights on a CPU against float64; a token's bits depend on nothing but the token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import FOUR_BITS, Codes, Inputs, Kind
from engine.kernels.gemm.group_panels import pack_group_panels
from engine.kernels.gemm.weight import gated_linear_reference, linear_reference

pytestmark = pytest.mark.usefixtures("isa")
SHAPES = [(1, 64, 64, 32), (3, 33, 70, 16), (15, 513, 96, 128), (130, 1100, 70, 1100)]  # rows, depth, width, group


def codes_of(kind: Kind, rows: int, columns: int, group: int, zeros: bool = False, order: bool = False) -> Codes:
    """Random codes that use all bits."""
    groups = -(-columns // group)
    values = torch.randint(0, 16, (rows, columns)).to(torch.uint8)
    if kind is Kind.INT8:
        values = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    elif kind is Kind.E4M3:
        values = (
            torch.randint(0, 0x7F, (rows, columns)).to(torch.uint8)
            | torch.randint(0, 2, (rows, 1)).to(torch.uint8) << 7
        )
    return Codes(
        kind, values, (torch.rand(rows, groups) + 0.1).to(torch.bfloat16 if order else torch.float32), group,
        row_scale=torch.rand(rows) if zeros else None,
        zero=torch.randint(-8, 8, (rows, groups)).to(torch.int8) if zeros else None,
        order=torch.randperm(columns) if order else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "depth", "width", "group"), SHAPES)
@pytest.mark.parametrize("kind", Kind)
def test_products_equal_float64_and_a_row_has_the_bits_it_has_alone(kind, tokens, depth, width, group, dtype):
    for zeros in (False, True, "floats") if kind in (Kind.INT4, Kind.INT8) else (False,):
        codes, bias = codes_of(kind, width, depth, group, bool(zeros), bool(zeros)), torch.randn(width)
        if zeros == "floats":
            codes = replace(codes, zero=4 * torch.randn(codes.scale.shape))
        weight = pack_group_panels(codes, bias, gated=False)
        torch.testing.assert_close(weight.dense().double(), codes.dense(), rtol=1e-6, atol=0)
        x, residual = torch.randn(tokens, depth).to(dtype), torch.randn(tokens, width).to(dtype)
        want = x.double() @ codes.dense().T + bias + residual
        got = weight.linear(x, None, residual)
        limit = 2e-6 if dtype == torch.float32 else 4e-3
        assert float((got.double() - want).norm() / want.norm()) < limit
        torch.testing.assert_close(
            linear_reference(x.double(), weight, None, residual.double()), want, rtol=1e-4, atol=1e-4
        )
        for row in {0, tokens - 1}:
            alone = weight.linear(x[row : row + 1].contiguous(), None, residual[row : row + 1].contiguous())
            assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.E4M3])
def test_a_panel_holds_gate_and_up(kind):
    codes = codes_of(kind, 2 * 45, 96, 32)
    weight, x = pack_group_panels(codes, torch.randn(90), gated=True), torch.randn(9, 96)
    torch.testing.assert_close(weight.dense().double(), codes.dense(), rtol=1e-6, atol=0)
    want = gated_linear_reference(x.double(), weight, Activation.SILU)
    torch.testing.assert_close(
        weight.gated(x, Activation.SILU).double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max())
    )


@pytest.mark.parametrize("static", [None, 0.02])
@pytest.mark.parametrize("depth", [512, 1100])
def test_integers_are_exact_until_they_are_scaled(depth, static):
    """The largest possible sums, which float32 would round: 127 times 127 in every column."""
    codes = codes_of(Kind.INT8, 70, depth, depth)
    codes.values[:3] = 127
    inputs = Inputs(None if static is None else torch.tensor(static))
    weight = pack_group_panels(Codes(Kind.INT8, codes.values, codes.scale, depth, inputs=inputs), None, gated=False)
    x = torch.randn(17, depth)
    x[1], x[2] = 1.0, 0.0
    scale = torch.full((17,), static) if static else torch.where(x.abs().amax(1) > 0, x.abs().amax(1) / 127, 1.0)
    whole = (x / scale[:, None]).round().clamp(-128, 127)
    sums = (whole.long() @ codes.values.long().T).float()  # integers, rounded once
    assert torch.equal(weight.linear(x), sums * (scale[:, None] * codes.scale.T))


def test_four_bits_take_half_a_byte():
    for kind in FOUR_BITS:
        weight = pack_group_panels(codes_of(kind, 128, 256, 128), None, gated=False)
        assert weight.num_bytes == 128 * 256 // 2 + 128 * 2 * 4
