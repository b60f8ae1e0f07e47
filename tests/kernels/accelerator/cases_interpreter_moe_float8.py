"""Experts with FP8 weights and FP8 inputs in the interpreter against references: sorted pairs, pairs of few rows."""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.base.model_config import Routing
from engine.kernels.activation import Activation
from engine.kernels.gemm.codes import Codes, Inputs, Kind
from engine.kernels.gemm.float8_library import blocks_of
from engine.kernels.gemm.groups import Packed, packed
from engine.kernels.gemm.quantise_floats import CodedRows, launch_quantise_floats, quantise_floats_reference
from engine.kernels.moe.float8 import float8_experts_reference, launch_float8_experts, pack_float8_experts
from engine.kernels.moe.grouped import Tile
from engine.kernels.moe.pairs_float8 import joins, launch_pairs_float8
from engine.kernels.moe.route_rows import launch_route_rows
from engine.kernels.moe.sort import Pairs
from engine.kernels.norm import rms_norm_reference
from tests.kernels.accelerator.cases_interpreter_moe import drawn, error

GROUPS, POWERS = Inputs(kind=Kind.E4M3, group=128), Inputs(kind=Kind.E4M3, group=128, powers=True)
ROWS, GIVEN = Inputs(kind=Kind.E4M3), Inputs(torch.tensor(0.01), Kind.E4M3)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def codes_of(*shape: int) -> torch.Tensor:
    """Random codes except NaN, subnormal numbers included."""
    return (torch.randint(0, 0x7F, shape) + 0x80 * torch.randint(0, 2, shape)).to(torch.uint8)


def weight_of(rows: int, depth: int, scales: str, width: int = 0) -> Packed:
    """FP8 weights with scales per row, per 128 columns of a row, or per block."""
    groups = 1 if scales == "rows" else -(-depth // 128)
    scale = torch.rand(rows, groups) / 512
    if scales == "blocks":
        scale = (torch.rand(rows // 128, groups) / 512).repeat_interleave(128, 0)
    codes = Codes(Kind.E4M3, codes_of(rows, depth), scale, depth if groups == 1 else 128)
    weight = pack_float8_experts(codes, width)
    assert weight.tall == (128 if scales == "blocks" and groups > 1 else 1)
    assert torch.equal(weight.dense(), codes.dense())
    return weight


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [None, Activation.SILU, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spread", ["even", "one"])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(("block_m", "least"), [(16, 0), (64, 0), (64, 4), (4, 2)])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("then", [None, GROUPS, POWERS, ROWS])
@pytest.mark.parametrize(("width", "depth", "scales"), [
    (256, 384, "blocks"), (200, 304, "groups"), (200, 304, "rows"), (128, 128, "rows"),
])  # fmt: skip
def test_products_of_sorted_pairs(
    width, depth, scales, then, native, block_m, least, weighed, spread, biased, activation
):
    """Columns may end within an iteration, rows within a tile; an expert may have few pairs in its last tile."""
    experts, gated = 3, activation is not None
    pairs, rows = drawn(9, 2, experts, spread), experts * width * (1 + gated)
    weight = weight_of(rows, depth, scales, width)
    inputs = ROWS if scales == "rows" else GROUPS
    x = CodedRows(*quantise_floats_reference(torch.randn(9 if gated else pairs.count, depth), inputs, None, 0.0))
    bias = torch.randn(experts, width * (1 + gated)) if biased else None
    given = torch.rand(9, 2) if weighed and gated else None
    tile = Tile(block_m, 128, 128, 2, 4, least=least if gated else 0)
    arguments = (x, weight, experts, bias, pairs, activation, tile, torch.float32, given, then)
    got, want = launch_float8_experts(*arguments, native=native), float8_experts_reference(*arguments)
    if isinstance(want, CodedRows):
        assert isinstance(got, CodedRows)
        torch.testing.assert_close(got.scales, want.scales, rtol=1e-5, atol=0)
        got, want = got.dense(), want.dense()
        # A code may be the neighbouring one if a sum is near the border between two codes.
        assert error(got, want) < 5e-3
    assert error(got, want) < (1e-5 if then is None or not gated or then is ROWS else 5e-3)


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize(("scales", "inputs"), [
    ("groups", GROUPS), ("blocks", POWERS), ("rows", ROWS), ("rows", GIVEN),
])  # fmt: skip
@pytest.mark.parametrize(("tokens", "blocks", "depth"), [(1, 1, 192), (2, 3, 1088), (2, None, 64)])
def test_pairs_of_few_rows(tokens, blocks, depth, scales, inputs, made, weighed, biased, activation):
    """x is quantised before or inside the product. The row of a padding pair stays unchanged."""
    experts, width, gated = 4, 128 if scales == "blocks" else 5, activation is not None
    weight = weight_of(experts * width * (1 + gated), depth, scales, width)
    chosen = torch.randint(0, experts, (tokens, 2), dtype=torch.int32)
    chosen[-1, 1] = experts
    pairs = Pairs(2, chosen, None, None)
    floats = torch.randn(tokens if gated else 2 * tokens, depth)
    floats[0, :64] = 0.0
    x = quantise_floats_reference(floats, inputs, None, 0.0)
    bias = torch.randn(experts, width * (1 + gated)) if biased else None
    given = torch.rand(tokens, 2) if weighed and gated else None
    got = launch_pairs_float8(floats if made else x, weight, experts, bias, pairs, activation, given, blocks, inputs,
                              torch.float32)  # fmt: skip
    want = float8_experts_reference(x, weight, experts, bias, pairs, activation, Tile(16, 64, 128, 2, 4),
                                    torch.float32, given)  # fmt: skip
    assert isinstance(want, torch.Tensor)
    assert error(got[:-1], want[:-1]) < 1e-5


@pytest.mark.parametrize(("scales", "inputs", "width", "tokens", "activation"), [
    ("groups", GROUPS, 5, 3, Activation.SILU), ("rows", ROWS, 6, 2, None), ("blocks", GROUPS, 128, 1, None),
])  # fmt: skip
def test_a_shared_expert_comes_after_the_pairs(scales, inputs, width, tokens, activation):
    """The other rows do not change; the last rows are those of the same matrix as the only expert."""
    experts, sides, top_k = 2, 1 if activation is None else 2, 1 if scales == "blocks" else 2
    weight = weight_of(experts * width * sides, 192, scales, width)
    scale = torch.rand(width * sides, 1 if scales == "rows" else 2) / 512
    if scales == "blocks":
        scale = scale[:1].expand(width, 2)
        weight = replace(weight, scales=torch.nn.functional.pad(weight.scales[:, :2], (0, 2)))
    made = Codes(Kind.E4M3, codes_of(width * sides, 192), scale, 192 if scales == "rows" else 128)
    shared = packed(made, words=False)
    shared = replace(shared, blocks=blocks_of(made.scale)) if scales == "blocks" else shared
    assert joins(weight, experts, shared)
    chosen = torch.randint(0, experts, (tokens, top_k), dtype=torch.int32)
    pairs, alone = Pairs(top_k, chosen, None, None), Pairs(1, torch.zeros(tokens, 1, dtype=torch.int32), None, None)
    x, rest = torch.randn(tokens if sides > 1 else (1 + top_k) * tokens, 192), (inputs, torch.float32)
    first = x if sides > 1 else x[: top_k * tokens]
    plain = launch_pairs_float8(first, weight, experts, None, pairs, activation, None, 4, *rest)
    own = launch_pairs_float8(x[-tokens:], shared, 1, None, alone, activation, None, 4, *rest)
    got = launch_pairs_float8(x, weight, experts, None, pairs, activation, None, 3, *rest, shared)
    torch.testing.assert_close(got, torch.cat([plain, own]))


def test_a_shared_expert_of_another_form_stays_apart():
    weight = weight_of(4 * 256, 192, "blocks", 256)
    for rows, depth, scales in ((128, 192, "blocks"), (256, 320, "blocks"), (256, 192, "groups"), (256, 192, "rows")):
        assert not joins(weight, 4, weight_of(rows, depth, scales, rows))
    assert not joins(weight_of(4 * 256, 192, "groups", 256), 4, weight_of(256, 192, "blocks", 256))


@pytest.mark.parametrize("made", [False, True])
def test_a_nan_among_few_rows_stays_one(made):
    weight, pairs = weight_of(8, 64, "rows"), Pairs(1, torch.tensor([[0], [1]], dtype=torch.int32), None, None)
    floats = torch.randn(2, 64)
    floats[1, 7] = torch.nan
    x = floats if made else quantise_floats_reference(floats, ROWS, None, 0.0)
    got = launch_pairs_float8(x, weight, 2, None, pairs, None, None, 1, ROWS, torch.float32)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


@pytest.mark.parametrize("inputs", [GROUPS, POWERS, ROWS, GIVEN])
def test_routes_of_few_rows_make_codes_too(inputs):
    """The last program makes the codes; the one before it multiplies by the weight of the shared expert's gate."""
    routing = Routing(6, 2, norm_topk_prob=True)
    x, gain, router = torch.randn(3, 200), torch.rand(200), torch.randn(6, 200) / 4
    rest, gate = (gain, 1e-5, router, None, None, routing), torch.randn(1, 200)
    for _ in range(2):
        plain, with_codes = launch_route_rows(x, *rest), launch_route_rows(x, *rest, inputs=inputs, gate=gate)
        assert all(torch.equal(one, other) for one, other in zip(plain[:3], with_codes[:3]))
        want = quantise_floats_reference(plain[0], inputs, None, 0.0)
        assert all(torch.equal(one, other) for one, other in zip(with_codes[3], want))
        torch.testing.assert_close(with_codes[4], plain[0] @ gate.T)
        gated = launch_route_rows(x, *rest, gate=gate)
        assert all(torch.equal(one, other) for one, other in zip(plain[:3], gated[:3]))
        torch.testing.assert_close(gated[4], with_codes[4])
    assert plain[3:] == (None, None)


def test_normed_rows_are_written_next_to_their_codes():
    x, gain = torch.randn(5, 300), torch.rand(300)
    normed = torch.empty_like(x)
    coded = launch_quantise_floats(x, GROUPS, gain, 1e-5, None, normed)
    want = quantise_floats_reference(normed, GROUPS, None, 0.0)
    torch.testing.assert_close(normed, rms_norm_reference(x, gain, 1e-5))
    assert all(torch.equal(one, other) for one, other in zip(coded, want))
