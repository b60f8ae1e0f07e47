"""Products with quantised weights in the interpreter against float64 of the same codes."""

import pytest
import torch
import triton  # noqa: F401  (before any kernel file, so that they take it; TRITON_INTERPRET says in which mode)

from engine.kernels.gemm.codes import FOUR_BITS, Codes, Inputs, Kind, decoded
from engine.kernels.gemm.groups import Tile, groups_product_reference, launch_groups_product, packed
from engine.kernels.gemm.quantise_rows import launch_quantise_rows, quantise_rows_reference


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def codes_of(kind, rows, columns, group, zeros=False):
    """Random codes of all bits."""
    groups = -(-columns // group)
    values = torch.randint(0, 16, (rows, columns)).to(torch.uint8)
    if kind is Kind.INT8:
        values = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    elif kind is Kind.E4M3:
        values = torch.randint(0, 0x7F, (rows, columns)).to(torch.uint8)
    zero = torch.randint(-8, 8, (rows, groups)).to(torch.int8) if zeros else None
    return Codes(kind, values, torch.rand(rows, groups) + 0.1, group, torch.rand(rows) if zeros else None, zero)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("width", "depth", "group"), [(70, 96, 32), (65, 320, 128), (64, 200, 200), (20, 208, 16)])
@pytest.mark.parametrize("kind", Kind)
def test_products(kind, width, depth, group, zeros, rows, dtype):
    weight = packed(codes_of(kind, width, depth, group, zeros and kind in (Kind.INT4, Kind.INT8)))
    x, bias = torch.randn(rows, depth + 8).to(dtype)[:, :depth], torch.randn(width)
    if kind is Kind.E4M3 and dtype == torch.float16:
        x = x / 64
    tile = Tile(16, 64, 64 if dtype == torch.float32 else 128, 128, 1, 4)
    for residual in (None, torch.randn(rows, width).to(dtype)):
        got, want = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=torch.float64)
        launch_groups_product(x, weight, bias, residual, got, None, tile)
        groups_product_reference(x.double(), weight, bias, residual, want, None, tile)
        error = float((got.double() - want).norm() / want.norm())
        assert error < (1e-6 if dtype == torch.float32 else 1e-3)


def test_four_bits_in_memory_are_what_was_packed():
    for kind in FOUR_BITS:
        codes = codes_of(kind, 5, 100, 100)
        torch.testing.assert_close(packed(codes).dense(), codes.dense())
        assert decoded(kind, torch.arange(16)).unique().numel() == (15 if kind is Kind.E2M1 else 16)


@pytest.mark.parametrize("static", [False, True])
def test_integers_meet_integers(static):
    codes = codes_of(Kind.INT8, 70, 700, 700)
    weight, x = packed(codes), torch.randn(20, 708)[:, :700]
    x[3] = 0
    inputs = Inputs(torch.tensor(0.02) if static else None)
    whole, scales = launch_quantise_rows(x, inputs.scale)
    wanted, wanted_scales = quantise_rows_reference(x, inputs.scale)
    assert torch.equal(whole, wanted)
    assert torch.equal(scales, wanted_scales)
    got, want = torch.empty(20, 70), torch.empty(20, 70)
    tile = Tile(16, 64, 128, 256, 1, 4)
    launch_groups_product(whole, weight, None, None, got, scales, tile)
    groups_product_reference(whole, weight, None, None, want, scales, tile)
    torch.testing.assert_close(got, want, rtol=5e-7, atol=0)
