"""Products of experts with 4-bit and 8-bit weights in the interpreter against their references."""

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Kind
from engine.kernels.gemm.groups import packed
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.moe.coded import coded_product_reference, launch_coded_product
from engine.kernels.moe.grouped import Tile
from engine.kernels.moe.mxfp4 import launch_mxfp4_product, mxfp4_product_reference
from engine.kernels.moe.pairs import launch_pairs
from engine.kernels.moe.pairs_float8 import launch_pairs_float8
from engine.kernels.moe.sort import Pairs
from engine.kernels.moe.values import launch_values_product
from tests.kernels.accelerator.cases_interpreter_moe import drawn, error

# NumPy warns about operations on NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [None, Activation.SILU, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spread", ["even", "few"])
@pytest.mark.parametrize(("kind", "group", "zeros"), [
    (Kind.E2M1, 32, False), (Kind.INT4, 64, True), (Kind.E4M3, 128, False), (Kind.INT8, 200, False),
])  # fmt: skip
@pytest.mark.parametrize("weighed", [False, True])
def test_products_by_codes(kind, group, zeros, spread, biased, activation, weighed):
    experts, width, depth, gated = 3, 50, 160, activation is not None
    pairs = drawn(5, 2, experts, spread)
    rows, groups = experts * width * (1 + gated), -(-depth // group)
    values = torch.randint(0, 0x7F if kind is Kind.E4M3 else 16, (rows, depth)).to(torch.uint8)
    values = values.to(torch.int8) if kind is Kind.INT8 else values
    zero = torch.randint(-8, 8, (rows, groups)).to(torch.int8) if zeros else None
    weight = packed(Codes(kind, values, torch.rand(rows, groups) / 8, group, torch.rand(rows) if zeros else None, zero))
    bias = torch.randn(experts, width * (1 + gated)) if biased else None
    x = torch.randn(5 if gated else pairs.count, depth) / (256 if kind is Kind.E4M3 else 4)
    arguments = (x, weight, experts, bias, pairs, activation, Tile(16, 64, 64, 2, 4),
                 torch.rand(5, 2) if weighed and gated else None)  # fmt: skip
    got, want = launch_coded_product(*arguments), coded_product_reference(*arguments)
    assert error(got, want) < 1e-5


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [None, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spread", ["even", "few"])
@pytest.mark.parametrize("tile", [Tile(16, 64, 64, 2, 4), Tile(8, 32, 64, 2, 2, splits=3)])
@pytest.mark.parametrize("weighed", [False, True])
def test_products_by_mxfp4(tile, spread, biased, activation, weighed):
    experts, width, depth, gated = 3, 50, 192, activation is not None
    pairs, rows = drawn(9, 2, experts, spread), experts * width * (1 + gated)
    scale = torch.randint(-20, 3, (rows, depth // 32)).float().exp2().to(torch.bfloat16)
    weight = packed(Codes(Kind.E2M1, torch.randint(0, 16, (rows, depth)).to(torch.uint8), scale, 32))
    bias = torch.randn(rows // experts * experts).view(experts, -1) if biased else None
    x = torch.randn(9 if gated else pairs.count, depth) / 8
    given = torch.rand(9, 2) if weighed and gated else None
    arguments = (x, weight, experts, bias, pairs, activation, tile, given)
    assert error(launch_mxfp4_product(*arguments), mxfp4_product_reference(*arguments)) < 1e-5


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [None, Activation.SILU, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spread", ["even", "one"])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("block_k", [64, 128])
@pytest.mark.parametrize(("kind", "group", "zeros", "dtype"), [
    (Kind.E2M1, 32, False, torch.bfloat16), (Kind.E2M1, 16, False, torch.float32),
    (Kind.INT4, 128, True, torch.bfloat16), (Kind.INT4, 64, True, torch.float32),
    (Kind.INT4, 200, False, torch.float32), (Kind.NF4, 64, False, torch.float32),
    (Kind.E4M3, 128, False, torch.float32), (Kind.E4M3, 32, False, torch.bfloat16),
    (Kind.INT8, 64, True, torch.float32),
])  # fmt: skip
def test_products_whose_scales_multiply_values(kind, group, zeros, dtype, block_k, weighed, spread, biased, activation):
    """Columns may end within an iteration and within a group, rows within a tile."""
    experts, width, depth, gated = 3, 72, 200 if group > 64 else 192, activation is not None
    pairs, rows, groups = drawn(9, 2, experts, spread), experts * width * (1 + gated), -(-depth // group)
    values = torch.randint(0, {Kind.E4M3: 0x7F, Kind.INT8: 256}.get(kind, 16), (rows, depth)).to(torch.uint8)
    values = values.view(torch.int8) if kind is Kind.INT8 else values
    zero = torch.randint(-8, 8, (rows, groups)).to(torch.int8) if zeros else None
    scale = torch.randint(-9, -2, (rows, groups)).float().exp2().to(dtype)
    weight = packed(Codes(kind, values, scale, group, torch.rand(rows) if zeros else None, zero))
    bias = torch.randn(experts, width * (1 + gated)) if biased else None
    x = torch.randn(9 if gated else pairs.count, depth) / (256 if kind in (Kind.E4M3, Kind.INT8) else 4)
    tile = Tile(16, 64, block_k, 2, 4, values=True)
    arguments = (x, weight, experts, bias, pairs, activation, tile, torch.rand(9, 2) if weighed and gated else None)
    assert error(launch_values_product(*arguments), coded_product_reference(*arguments)) < 1e-5


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [3, 9])
@pytest.mark.parametrize("activation", [None, Activation.CLAMPED_SWIGLU])
def test_programs_that_share_the_columns_of_few_pairs(splits, activation):
    """Also more programs than a row has runs of 64 columns. After each launch the counters are zero again."""
    experts, width, depth, gated = 4, 50, 256, activation is not None
    rows = experts * width * (1 + gated)
    scale = torch.randint(-4, 3, (rows, depth // 32)).float().exp2().to(torch.bfloat16)
    weight = packed(Codes(Kind.E2M1, torch.randint(0, 16, (rows, depth)).to(torch.uint8), scale, 32))
    chosen = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    pairs = Pairs(3, chosen, None, None)
    x = torch.randn(1 if gated else 3, depth) / 8
    bias = torch.randn(experts, rows // experts)
    for _ in range(2):
        arguments = (x, weight, experts, bias, pairs, activation, Tile(8, 32, 64, 2, 2, splits), None)
        assert error(launch_mxfp4_product(*arguments), mxfp4_product_reference(*arguments)) < 1e-5
    assert not arrivals(x.device).any()


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [None, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(("blocks", "depth"), [(1, 192), (3, 1088), (None, 64)])
def test_pairs_of_one_row(blocks, depth, weighed, biased, activation):
    """A pair of padding has no expert; its row stays unchanged. Pairs may share a row without an activation too."""
    experts, width, gated = 4, 5, activation is not None
    rows = experts * width * (1 + gated)
    scale = torch.randint(-20, 20, (rows, depth // 32)).float().exp2().to(torch.bfloat16)
    weight = packed(Codes(Kind.E2M1, torch.randint(0, 16, (rows, depth)).to(torch.uint8), scale, 32))
    pairs = Pairs(2, torch.tensor([[2, 4]], dtype=torch.int32), None, None)
    x = (torch.randn(1 if gated or weighed else 2, depth) / 8).bfloat16()
    bias = torch.randn(experts, rows // experts) if biased else None
    given = torch.rand(1, 2) if weighed and gated else None
    got = launch_pairs(x, weight, experts, bias, pairs, activation, given, blocks=blocks)
    tile, x = Tile(16, 64, 64, 2, 4), x if gated else x.expand(2, -1)
    want = mxfp4_product_reference(x.double(), weight, experts, bias, pairs, activation, tile, given)
    torch.testing.assert_close(got[:1].double(), want[:1], rtol=2**-7, atol=1e-3)  # the interpreter truncates bits


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("scales", ["blocks", "rows", "both", "bfloat16"])
@pytest.mark.parametrize(("tokens", "blocks", "depth"), [(1, 1, 192), (3, 3, 1088), (2, None, 64)])
def test_pairs_of_few_rows_by_fp8(tokens, blocks, depth, scales, weighed, biased, activation):
    """All codes, subnormal numbers included. A pair of padding has no expert; its row stays unchanged."""
    experts, width, gated = 4, 5, activation is not None
    rows, groups = experts * width * (1 + gated), 1 if scales == "rows" else -(-depth // 128)
    values = torch.randint(0, 0x7F, (rows, depth)) + 0x80 * torch.randint(0, 2, (rows, depth))
    scale = torch.rand(rows, groups).to(torch.bfloat16 if scales == "bfloat16" else torch.float32) / 128
    of_rows = torch.rand(rows) if scales == "both" else None
    weight = packed(Codes(Kind.E4M3, values.to(torch.uint8), scale, depth if groups == 1 else 128, of_rows))
    chosen = torch.randint(0, experts, (tokens, 2), dtype=torch.int32)
    chosen[-1, 1] = experts
    pairs = Pairs(2, chosen, None, None)
    x = (torch.randn(tokens if gated else 2 * tokens, depth) / 8).bfloat16()
    bias = torch.randn(experts, rows // experts) if biased else None
    given = torch.rand(tokens, 2) if weighed and gated else None
    got = launch_pairs_float8(x, weight, experts, bias, pairs, activation, given, blocks)
    want = coded_product_reference(x.double(), weight, experts, bias, pairs, activation, Tile(16, 64, 64, 2, 4), given)
    # The interpreter truncates bits.
    torch.testing.assert_close(got[:-1].double(), want[:-1], rtol=2**-7, atol=1e-3)
