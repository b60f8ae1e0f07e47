"""Products with quantised weights in the interpreter against float64 of the same codes."""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.kernels.activation import Activation, launch_point
from engine.kernels.gemm.code_sums import block_k_of
from engine.kernels.gemm.codes import FOUR_BITS, Codes, Inputs, Kind, decoded
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.float8 import float8_product_reference, launch_float8_product
from engine.kernels.gemm.float8_few import few_tile_of, launch_float8_few_product
from engine.kernels.gemm.float8_library import blocks_of
from engine.kernels.gemm.float8_row import (
    Floats,
    RowsCut,
    launch_float8_row_of_floats,
    launch_float8_row_product,
)
from engine.kernels.gemm.float8_rows import Cut as FewCut
from engine.kernels.gemm.float8_rows import launch_float8_rows_product
from engine.kernels.gemm.groups import KINDS, Tile, groups_product_reference, launch_groups_product, packed
from engine.kernels.gemm.one_row import Cut, launch_one_row_product, one_row_product_reference
from engine.kernels.gemm.quantise_floats import launch_quantise_floats, quantise_floats_reference
from engine.kernels.gemm.quantise_rows import launch_quantise_rows, quantise_rows_reference
from engine.kernels.gemm.scaled_values import launch_scaled_values, scaled_values_reference
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.value_cuts import Cut as ValuesCut
from engine.kernels.gemm.value_cuts import cut_of
from engine.kernels.gemm.widen_weight import launch_widen_weight, widen_weight_reference


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def codes_of(kind, rows, columns, group, zeros=False):
    """Random codes that use all bits."""
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
@pytest.mark.parametrize("added", [False, True])
def test_products(added, kind, width, depth, group, zeros, rows, dtype):
    weight = packed(codes_of(kind, width, depth, group, zeros and kind in (Kind.INT4, Kind.INT8)))
    x, bias = torch.randn(rows, depth + 8).to(dtype)[:, :depth], torch.randn(width)
    if kind is Kind.E4M3 and dtype == torch.float16:
        x = x / 64
    tile = Tile(16, 64, block_k_of(KINDS[kind], weight.group, x.itemsize), 128, 1, 4)
    residual = torch.randn(rows, width).to(dtype) if added else None
    got, want = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=torch.float64)
    launch_groups_product(x, weight, bias, residual, got, None, tile)
    groups_product_reference(x.double(), weight, bias, residual, want, None, tile)
    error = float((got.double() - want).norm() / want.norm())
    assert error < (1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(("whole", "turns"), [(99, 9), (0, 2), (1, 1)])
@pytest.mark.parametrize(
    ("kind", "width", "depth", "group", "activation"),
    [
        (Kind.INT4, 70, 208, 16, None),
        (Kind.INT4, 140, 300, 128, Activation.SILU),
        (Kind.NF4, 70, 320, 64, None),
        (Kind.E2M1, 64, 200, 200, Activation.CLAMPED_SWIGLU),
    ],
)
def test_scales_on_values(kind, width, depth, group, activation, whole, turns):
    """One program per tile, several per tile, or a mix; tiles extend beyond rows, columns and depth."""
    weight = packed(codes_of(kind, width, depth, group, zeros=group == 16))
    if group == 64:
        weight = replace(weight, scales=weight.scales.bfloat16())
    if group == 128:
        weight = replace(weight, scales=weight.scales.half())
    x, bias, columns = (
        torch.randn(70, depth + 8)[:, :depth] / 8,
        torch.randn(width),
        width // (1 if activation is None else 2),
    )
    block_k = 128 if weight.group % 128 == 0 else 64
    cut = ValuesCut(64, 128, block_k, whole, min(turns, -(-depth // block_k)), 1, 4)
    for residual in (None, torch.randn(70, columns))[: 2 if activation is None else 1]:
        got, want = torch.full((70, columns), torch.nan), torch.empty(70, columns, dtype=torch.float64)
        launch_scaled_values(x, weight, bias, residual, got, activation, cut)
        scaled_values_reference(x.double(), weight, bias, residual, want, activation, cut)
        assert float((got.double() - want).norm() / want.norm()) < 1e-6
    assert not arrivals(x.device).any()


def test_scales_of_four_bits_take_two_bytes_if_float16_holds_them():
    codes = codes_of(Kind.INT4, 20, 256, 128)
    assert packed(codes).scales.dtype is torch.float32
    short = packed(replace(codes, scale=codes.scale.half().float()))
    assert short.scales.dtype is torch.float16
    assert torch.equal(short.dense(), replace(codes, scale=codes.scale.half().float()).dense())
    assert packed(replace(codes, scale=codes.scale.bfloat16())).scales.dtype is torch.bfloat16
    x, got, want = torch.randn(5, 256), torch.empty(5, 20), torch.empty(5, 20, dtype=torch.float64)
    launch_groups_product(x, short, None, None, got, None, Tile(16, 64, 128, 128, 1, 4))
    groups_product_reference(x.double(), short, None, None, want, None, Tile(16, 64, 128, 128, 1, 4))
    assert float((got.double() - want).norm() / want.norm()) < 1e-6
    torch.testing.assert_close(launch_widen_weight(short, torch.float32), widen_weight_reference(short, torch.float32))


def test_every_turn_of_scaled_values_has_a_program():
    """For every shape: whole tiles first, then runs that cover the other tiles; most program slots have work."""
    for rows in (2, 32, 65, 128, 200, 512, 4096):
        slots = 132 * (4 if rows <= 32 else 2)  # up to four programs per multiprocessor if tiles are small
        for width, depth, group, gated in (
            (6144, 4096, 128, False), (4096, 12288, 128, False), (24576, 4096, 128, True), (1024, 2048, 32, False),
            (64, 96, 32, False), (151936, 4096, 64, False), (256, 64, 128, True),
        ):  # fmt: skip
            cut = cut_of(rows, width, depth, group, gated, 132)
            tiles, turns = -(-rows // cut.block_m) * -(-width // cut.block_n), -(-depth // cut.block_k)
            assert group % cut.block_k == 0 or cut.block_k == 64
            assert 0 <= cut.whole <= tiles
            assert 0 < cut.turns <= turns
            others = -(-(tiles - cut.whole) * turns // cut.turns)
            assert cut.whole + others <= max(slots, tiles) + slots
            assert others <= slots + 4 or cut.turns == turns


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.INT8])
def test_zeros_may_be_floats(kind):
    """Float zeros, as in GGUF's blocks with offsets."""
    codes = codes_of(kind, 70, 320, 32)
    weight = packed(replace(codes, zero=4 * torch.randn(codes.scale.shape)))
    x, got, want = torch.randn(5, 320), torch.empty(5, 70), torch.empty(5, 70, dtype=torch.float64)
    launch_groups_product(x, weight, None, None, got, None, Tile(16, 64, 64, 128, 1, 4))
    groups_product_reference(x.double(), weight, None, None, want, None, Tile(16, 64, 64, 128, 1, 4))
    assert float((got.double() - want).norm() / want.norm()) < 1e-6
    torch.testing.assert_close(
        launch_widen_weight(weight, torch.float32), widen_weight_reference(weight, torch.float32)
    )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("width", "depth", "group"), [(70, 96, 32), (20, 600, 128), (17, 200, 200), (5, 320, 16)])
@pytest.mark.parametrize("kind", Kind)
def test_a_weight_is_widened_whole(kind, width, depth, group, zeros):
    weight = packed(codes_of(kind, width, depth, group, zeros and kind in (Kind.INT4, Kind.INT8)))
    for dtype in (torch.float32, torch.bfloat16):
        got, want = launch_widen_weight(weight, dtype), widen_weight_reference(weight, dtype)
        torch.testing.assert_close(got, want, rtol=3e-7 if dtype == torch.float32 else 8e-3, atol=0)
        assert got.dtype == dtype


def test_words_in_memory_are_what_was_packed():
    for kind in Kind:
        codes = codes_of(kind, 5, 100, 100)
        torch.testing.assert_close(packed(codes).dense(), codes.dense())
        if kind in FOUR_BITS:
            assert decoded(kind, torch.arange(16)).unique().numel() == (15 if kind is Kind.E2M1 else 16)


@pytest.mark.parametrize("static", [False, True])
def test_products_of_integers_by_integers(static):
    codes = codes_of(Kind.INT8, 70, 700, 700)
    weight, x = packed(codes, words=False), torch.randn(20, 708)[:, :700]
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


FLOATS = {
    "token": Inputs(kind=Kind.E4M3),
    "number": Inputs(torch.tensor(0.003), Kind.E4M3),
    "groups": Inputs(kind=Kind.E4M3, group=128),
    "powers": Inputs(kind=Kind.E4M3, group=128, powers=True),
}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("how", FLOATS)
def test_rows_become_fp8(how, normed):
    x, gain = torch.randn(6, 308)[:, :300], torch.rand(300) if normed else None
    x[2], x[3], x[4, 128:] = 0, 1e-4 * x[3], 0  # zeros, and codes below the smallest exponent with a scale of 0.003
    codes, scales = launch_quantise_floats(x, FLOATS[how], gain, 1e-5)
    wanted, wanted_scales = quantise_floats_reference(x, FLOATS[how], gain, 1e-5)
    if normed:  # the squares are summed in another order
        torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
        assert int((codes.int() - wanted.int()).abs().max()) <= 1
        assert (codes == wanted).float().mean() > 0.99
    else:
        assert torch.equal(codes, wanted)
        assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize("how", FLOATS)
def test_activated_rows_become_fp8(how, activation):
    """One launch gives the codes of two launches, with the activation's result rounded to x's dtype in between."""
    x = 3 * torch.randn(6, 616, dtype=torch.float32)[:, :600].to(torch.float16)
    x[2] = 0
    codes, scales = launch_quantise_floats(x, FLOATS[how], None, 0, activation)
    both = launch_quantise_floats(launch_point(activation, x, gated=True), FLOATS[how], None, 0)
    assert codes.shape == (6, 300)
    assert torch.equal(codes, both[0])
    assert torch.equal(scales, both[1])


def test_every_float_becomes_its_nearest_fp8():
    """All codes, the midpoints between neighbouring codes, and the floats next to the midpoints."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = torch.cat([torch.nextafter(middles, torch.tensor(to)) for to in (0.0, 500.0)])
    x = torch.cat([numbers, middles, beside, torch.tensor([449.0, 1e30])])
    x = torch.cat([x, -x])[None]
    codes, _ = launch_quantise_floats(x, Inputs(torch.tensor(1.0), Kind.E4M3), None, 0)
    assert torch.equal(codes, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("blocked", [False, True])
def test_products_of_fp8_by_fp8_codes(blocked, rows, native):
    weight = packed(codes_of(Kind.E4M3, 70, 700, 128 if blocked else 700), words=False)
    x, x_scales = quantise_floats_reference(torch.randn(rows, 700), FLOATS["groups" if blocked else "token"], None, 0)
    tile = Tile(16, 64, 128, 256, 1, 4)
    for bias, residual in ((None, None), (torch.randn(70), torch.randn(rows, 70))):
        got, want = torch.empty(rows, 70), torch.empty(rows, 70, dtype=torch.float64)
        launch_float8_product(x, x_scales, weight, bias, residual, got, tile, native)
        float8_product_reference(x, x_scales, weight, bias, residual, want, tile)
        assert float((got.double() - want).norm() / want.norm()) < 1e-6


def of_few_rows(width, depth, blocked):
    """A weight with a scale per row, or per block."""
    codes = codes_of(Kind.E4M3, width, depth, 128 if blocked else depth)
    if blocked:
        codes = replace(codes, scale=codes.scale[::128].repeat_interleave(128, 0))
    weight = packed(codes, words=False)
    return replace(weight, blocks=blocks_of(weight.scales)) if blocked else weight


@pytest.mark.parametrize(
    ("rows", "width", "depth", "blocked"),
    [(2, 70, 720, False), (20, 64, 4112, False), (64, 130, 256, False), (3, 256, 4176, True), (20, 128, 640, True)],
)
def test_few_rows_of_fp8_by_fp8(rows, width, depth, blocked):
    """Sizes that are no multiples of a tile, in one part or two."""
    weight, tile = of_few_rows(width, depth, blocked), few_tile_of(rows, width, depth)
    tile = tile._replace(part_len=2304) if depth > 2304 else tile
    form = FLOATS["groups" if blocked else "token"]
    x, scales = quantise_floats_reference(torch.randn(rows, depth), form, None, 0)
    for bias, residual in ((None, None), (torch.randn(width), torch.randn(rows, width))):
        got, want = torch.empty(rows, width), torch.empty(rows, width, dtype=torch.float64)
        launch_float8_few_product(x, scales, weight, bias, residual, got, tile)
        float8_product_reference(x, scales, weight, bias, residual, want, tile)
        assert float((got.double() - want).norm() / want.norm()) < 1e-6
    assert not arrivals(x.device).any()


@pytest.mark.parametrize("how", FLOATS)
def test_nan_stays_nan_in_fp8(how):
    x = torch.randn(2, 300)
    x[0, 7] = float("nan")
    codes, _ = launch_quantise_floats(x, FLOATS[how], None, 0.0)
    wanted, _ = quantise_floats_reference(x, FLOATS[how], None, 0.0)
    assert codes[0, 7] == wanted[0, 7] == 0x7F
    assert torch.equal(codes[1], wanted[1])


@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    ("width", "depth", "group"), [(70, 96, 32), (65, 320, 128), (64, 200, 200), (20, 500, 64), (33, 1100, 128)]
)
def test_one_row_by_four_bits(width, depth, group, blocks, activation):
    """With a norm before and one after the product; a program reads long rows in several iterations."""
    sides, zeros = (1 if activation is None else 2), group in (64, 128)
    codes = codes_of(Kind.INT4, sides * width, depth, group, zeros)
    codes = replace(codes, scale=codes.scale / 64)  # the activation takes exp of the sums
    weight, bias, x = packed(codes), torch.randn(sides * width), torch.randn(1, depth).bfloat16()
    cut = Cut(4, 64, 1, blocks if depth <= 512 else 1)
    residual = torch.randn(1, width) if activation is None else None
    before = Unscaled(x, depth * torch.rand(3, 1), torch.ones(depth), 1e-5) if blocks > 1 else None
    gain, parts = torch.rand(width), -(-width // (4 * cut.blocks))
    wide, narrow = (
        Unscaled(torch.empty(1, width, dtype=dtype), torch.full((parts, 1), 9e9, dtype=dtype), gain.to(dtype), 1e-5)
        for dtype in (torch.float64, torch.float32)
    )
    got, want = torch.empty(1, width), torch.empty(1, width, dtype=torch.float64)
    launch_one_row_product(x, weight, bias, residual, got, activation, before, narrow, cut)
    one_row_product_reference(x.double(), weight, bias, residual, want, activation, before, wide)
    sums = narrow.squares.sum(0), wide.squares.sum(0)
    for one, other in ((got, want), (narrow.rows, wide.rows), sums):
        assert float((one.double() - other).norm() / other.norm()) < 1e-6


def test_one_row_may_be_large_or_small():
    """The kernel multiplies a code by x times a power of two, without an intermediate overflow."""
    weight = packed(codes_of(Kind.INT4, 20, 256, 128))
    for size in (2.0**-40, 2.0**40):
        x = (size * torch.randn(1, 256)).bfloat16()
        got, want = torch.empty(1, 20), torch.empty(1, 20, dtype=torch.float64)
        launch_one_row_product(x, weight, None, None, got, cut=Cut(4, 32, 1))
        one_row_product_reference(x.double(), weight, None, None, want)
        assert float((got.double() - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize(("width", "depth", "blocks", "cut"), [
    (70, 96, False, None), (33, 656, True, RowsCut(3, 1)), (20, 4112, False, None), (9, 4112, True, RowsCut(1, 2)),
])  # fmt: skip
def test_one_row_of_fp8_by_fp8(width, depth, blocks, cut):
    codes = codes_of(Kind.E4M3, width, depth, 128 if blocks else depth)
    codes.values[:, ::2] |= 0x80
    weight, groups = packed(codes, words=False), -(-depth // 128) if blocks else 1
    x, scales = torch.randint(0, 0x7F, (1, depth)).to(torch.uint8), torch.rand(groups, 1) + 0.5
    x[0, ::3] |= 0x80
    bias, residual = torch.randn(width), torch.randn(1, width)
    got, want = torch.empty(1, width), torch.empty(1, width, dtype=torch.float64)
    launch_float8_row_product(x, scales, weight, bias, residual, got, cut)
    float8_product_reference(x, scales, weight, bias, residual, want, Tile(16, 64, 128, 128, 1, 4))
    assert float((got.double() - want).norm() / want.norm()) < 1e-6
    x[0, 5] = 0x7F  # a NaN
    launch_float8_row_product(x, scales, weight, bias, residual, got, cut)
    assert got.isnan().all()


@pytest.mark.parametrize(("width", "depth", "cut"), [
    (41, 144, None), (12, 656, FewCut(3, 1)), (36, 4112, FewCut(2, 2)),
])  # fmt: skip
@pytest.mark.parametrize("rows", [2, 7])
def test_a_few_rows_of_fp8_by_fp8(rows, width, depth, cut):
    codes = codes_of(Kind.E4M3, width, depth, 128)
    codes.values[:, ::2] |= 0x80
    weight, groups = packed(codes, words=False), -(-depth // 128)
    x, scales = torch.randint(0, 0x7F, (rows, depth)).to(torch.uint8), torch.rand(groups, rows) + 0.5
    x[:, ::3] |= 0x80
    bias, residual = torch.randn(width), torch.randn(rows, width)
    got, want = torch.empty(rows, width), torch.empty(rows, width, dtype=torch.float64)
    launch_float8_rows_product(x, scales, weight, bias, residual, got, cut)
    float8_product_reference(x, scales, weight, bias, residual, want, Tile(16, 64, 128, 128, 1, 4))
    assert float((got.double() - want).norm() / want.norm()) < 1e-6
    x[1, 5] = 0x7F  # a NaN
    launch_float8_rows_product(x, scales, weight, None, residual, residual, cut)
    assert residual[1].isnan().all()
    assert residual[[0, *range(2, rows)]].isfinite().all()


@pytest.mark.parametrize(("width", "depth", "how", "cut"), [
    (9, 1280, "groups", None), (11, 656, "token", RowsCut(3, 1)), (6, 4112, "groups", RowsCut(1, 2)),
    (5, 256, "number", None), (5, 512, "powers", None),
])  # fmt: skip
@pytest.mark.parametrize("before", ["nothing", "norm", "activation"])
def test_one_row_that_becomes_fp8(width, depth, how, cut, before):
    """As if a kernel had quantised the row: the same codes, so the same sums but for their order."""
    inputs = FLOATS[how]
    weight = packed(codes_of(Kind.E4M3, width, depth, inputs.group or depth), words=False)
    x = torch.randn(1, depth * (2 if before == "activation" else 1))
    gain = torch.rand(depth) + 0.5 if before == "norm" else None
    activation = Activation.SILU if before == "activation" else None
    bias, residual = torch.randn(width), torch.randn(1, width)
    got, want = torch.empty(1, width), torch.empty(1, width, dtype=torch.float64)
    floats = Floats(x, inputs, gain, 1e-5, activation)
    launch_float8_row_of_floats(floats, weight, bias, residual, got, cut, native=False, pairs=False)
    codes, scales = quantise_floats_reference(x, inputs, gain, 1e-5, activation)
    float8_product_reference(codes, scales, weight, bias, residual, want, Tile(16, 64, 128, 128, 1, 4))
    # Sums and exponentials in another order round a few values to the next code.
    assert float((got.double() - want).norm() / want.norm()) < (1e-6 if before == "nothing" else 2e-3)
    if before != "norm":  # NumPy's maximum warns of a row without numbers
        x[0, 5] = float("nan")
        launch_float8_row_of_floats(floats, weight, bias, residual, got, cut, native=False, pairs=False)
        assert got.isnan().all()


@pytest.mark.parametrize(("width", "depth", "how", "cut", "rows"), [
    (9, 1280, "groups", None, 3), (11, 656, "token", RowsCut(3, 1), 0), (6, 4112, "groups", RowsCut(1, 2), 1),
])  # fmt: skip
def test_one_prescaled_row_that_becomes_fp8_and_rows_of_floats(width, depth, how, cut, rows):
    """The norm's division by the root mean square comes after the products, of codes and of floats."""
    inputs, stream, gain, eps = FLOATS[how], 3 * torch.randn(1, depth), torch.rand(depth) + 0.5, 1e-5
    weight = packed(codes_of(Kind.E4M3, width, depth, inputs.group or depth), words=False)
    further, squares = torch.randn(rows, depth) / depth**0.5, stream.square().view(16, -1).sum(1, keepdim=True)
    bias, got = torch.randn(width), torch.empty(1, width + rows)
    floats = Floats(stream * gain, inputs, eps=eps, squares=squares)
    given = further if rows else None
    launch_float8_row_of_floats(floats, weight, bias, None, got, cut, native=False, pairs=False, further=given)
    normed = stream.double() / (stream.double().square().mean() + eps).sqrt() * gain
    want = torch.empty(1, width, dtype=torch.float64)
    codes, scales = quantise_floats_reference(normed.float(), inputs, None, 0.0)
    float8_product_reference(codes, scales, weight, bias, None, want, Tile(16, 64, 128, 128, 1, 4))
    assert float((got[:, :width].double() - want).norm() / want.norm()) < 2e-3
    torch.testing.assert_close(got[:, width:].double(), normed @ further.double().T, rtol=1e-5, atol=1e-5)
