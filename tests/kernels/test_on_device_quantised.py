"""Products with quantised weights on a real GPU, against float64 of the same codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.activation import Activation, activate_reference, glu
from engine.kernels.gemm.codes import FOUR_BITS, Codes, Inputs, Kind
from engine.kernels.gemm.dispatch_codes import gated_by_tiles, linear_by_tiles
from engine.kernels.gemm.epilogue import Unscaled
from engine.kernels.gemm.float8 import float8_product
from engine.kernels.gemm.float8 import tile_of as float8_tile_of
from engine.kernels.gemm.float8_few import few_tile_of, float8_few_product
from engine.kernels.gemm.float8_few import takes as takes_few
from engine.kernels.gemm.float8_library import blocks_of
from engine.kernels.gemm.float8_row import Floats, RowsCut, float8_row_product, takes_floats
from engine.kernels.gemm.float8_rows import float8_rows_product
from engine.kernels.gemm.float8_weight import pack_float8
from engine.kernels.gemm.group_weight import pack_groups
from engine.kernels.gemm.groups import groups_product, packed, tile_of
from engine.kernels.gemm.long_products import LongProducts
from engine.kernels.gemm.one_row import launch_one_row_product
from engine.kernels.gemm.one_row import takes as one_row_takes
from engine.kernels.gemm.quantise_floats import launch_quantise_floats, quantise_floats, quantise_floats_reference
from engine.kernels.gemm.quantise_rows import quantise_rows, quantise_rows_reference
from engine.kernels.gemm.scaled import ScaledProducts
from engine.kernels.gemm.scaled_values import takes
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.widen_weight import launch_widen_weight, widen_weight_reference
from engine.kernels.norm import rms_norm
from engine.kernels.target import target
from tests.kernels.test_group_panels import codes_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
LIMIT = 3e-3  # bfloat16's rounding


def on_device(codes: Codes) -> Codes:
    names = ("values", "scale", "row_scale", "zero", "order")
    moved = {name: None if (found := getattr(codes, name)) is None else found.cuda() for name in names}
    return Codes(codes.kind, moved.pop("values"), moved.pop("scale"), codes.group, **moved, inputs=codes.inputs)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("width", "depth", "group"), [(4096, 4096, 128), (1000, 1536, 32), (6144, 4096, 4096)])
@pytest.mark.parametrize("kind", Kind)
def test_products(kind, width, depth, group, invariant):
    codes = codes_of(kind, width, depth, group, kind in (Kind.INT4, Kind.INT8))
    dense, bias = codes.dense().cuda(), torch.randn(width, device="cuda")
    weight = pack_groups(on_device(codes), bias, LongProducts(), invariant)
    x = torch.randn(300, depth, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(300, width, device="cuda", dtype=torch.bfloat16)
    want = x.double() @ dense.T + bias + residual
    few = weight.linear(x[:16], None, residual[:16])
    for rows in (1, 3, 16, 17, 64, 65, 300):
        runs = [weight.linear(x[:rows], None, residual[:rows]) for _ in range(5)]
        assert float((runs[0].double() - want[:rows]).norm() / want[:rows].norm()) < LIMIT
        assert all(torch.equal(runs[0], again) for again in runs[1:])
        assert not invariant or torch.equal(runs[0][:16], few[:rows])


@pytest.mark.skipif(target().arch != "sm_90", reason="for Hopper alone")
@pytest.mark.parametrize(
    ("width", "depth", "kind", "group", "zeros", "dtype", "gated"),
    [
        (6144, 2048, Kind.INT4, 128, False, torch.bfloat16, False),
        (6144, 2048, Kind.INT4, 128, True, torch.float32, True),
        (6144, 2048, Kind.INT4, 128, True, torch.float16, False),
        (1000, 1536, Kind.INT4, 32, True, torch.bfloat16, False),
        (1000, 1536, Kind.INT4, 4096, False, torch.float32, True),
        (24576, 256, Kind.E2M1, 16, False, torch.bfloat16, False),
        (24576, 256, Kind.NF4, 64, False, torch.float32, True),
    ],
)
def test_scales_on_values(width, depth, kind, group, zeros, dtype, gated):
    """Row counts of every tile and beyond, with and without memory after x; repeats and a graph give equal bits."""
    codes = codes_of(kind, width, depth, group, zeros)
    codes = replace(codes, scale=(codes.scale / 64).to(dtype))
    weight, dense = packed(on_device(codes)), codes.dense().cuda()
    bias = torch.randn(width, device="cuda")
    x = torch.randn(384, depth, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(384, width, device="cuda", dtype=torch.bfloat16)
    want = x.double() @ dense.T + bias
    want = activate_reference(want, Activation.SILU) if gated else want + residual
    for rows in (2, 16, 17, 32, 40, 64, 65, 128, 200, 384):
        assert takes(x[:rows], weight)

        def run(given: torch.Tensor, rows: int = rows) -> torch.Tensor:
            if gated:
                return gated_by_tiles(given, weight, bias, Activation.SILU)
            out = residual[:rows].clone()
            linear_by_tiles(given, weight, bias, out, out)
            return out

        runs = [run(x[:rows]) for _ in range(4)] + [run(x[:rows].clone())]
        assert float((runs[0].double() - want[:rows]).norm() / want[:rows].norm()) < (1 + gated) * LIMIT
        assert all(torch.equal(runs[0], again) for again in runs[1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x)
    graph.replay()
    assert torch.equal(captured, run(x))
    assert not arrivals(x.device).any()


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.INT8])
def test_zeros_may_be_floats(kind):
    """Float zeros, as in GGUF's blocks with offsets: Q4_K has one scale and one offset per 32 columns."""
    codes = codes_of(kind, 1000, 1536, 32)
    codes = replace(codes, zero=8 * torch.rand(codes.scale.shape))
    weight = pack_groups(on_device(codes), None, LongProducts(), False)
    x = torch.randn(300, 1536, device="cuda", dtype=torch.bfloat16)
    want = x.double() @ codes.dense().cuda().T
    for rows in (1, 17, 300):
        got = weight.linear(x[:rows])
        assert float((got.double() - want[:rows]).norm() / want[:rows].norm()) < LIMIT


@pytest.mark.parametrize("kind", Kind)
def test_many_rows_by_the_dequantised_weight(kind):
    """Plain, added to the output, and gated; the choice is timed, and both kernels are correct."""
    codes = codes_of(kind, 4096, 2048, 128, kind in (Kind.INT4, Kind.INT8))
    moved = on_device(codes)
    weight = pack_groups(moved, torch.randn(4096, device="cuda"), LongProducts(), False)
    torch.testing.assert_close(
        launch_widen_weight(weight.weight, torch.bfloat16).cpu(), widen_weight_reference(packed(codes), torch.bfloat16)
    )
    dense = codes.dense().cuda()
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 64
    want = x.double() @ dense.T + weight.bias
    gate, up = want.chunk(2, 1)
    silu = torch.nn.functional.silu(gate) * up
    for timed in (False, True):
        for rows in (512, 2048):
            out = torch.ones(rows, 4096, device="cuda", dtype=torch.bfloat16)
            for got, wanted in (
                (weight.linear(x[:rows]), want[:rows]),
                (weight.linear(x[:rows], out, out), want[:rows] + 1),
                (weight.gated(x[:rows], Activation.SILU), silu[:rows]),
            ):
                assert float((got.double() - wanted).norm() / wanted.norm()) < 1.5 * LIMIT  # weights are rounded too
        if not timed:
            weight.long.autotune([2048], torch.bfloat16)
    print(f"{kind}: widened whole from {sorted(weight.long.least.values())} rows on")


@pytest.mark.parametrize("kind", Kind)
def test_every_code_is_its_value(kind):
    """Identity rows times each column: the unit's conversion of codes is exact, and NF4's numbers are rounded once."""
    values = torch.arange(16 if kind in FOUR_BITS else 256, device="cuda").to(torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0  # NaN in e4m3
    codes = torch.stack([values.roll(k) for k in range(128)], 1)
    codes = codes.view(torch.int8) if kind is Kind.INT8 else codes
    whole = Codes(kind, codes, torch.ones(len(codes), 1, device="cuda"), 128)
    got = pack_groups(whole, None, LongProducts(), False).linear(torch.eye(128, device="cuda", dtype=torch.bfloat16))
    wanted = whole.dense().t()
    assert torch.equal(got.double(), wanted.bfloat16().double() if kind is Kind.NF4 else wanted)


@pytest.mark.parametrize("static", [None, 0.02])
def test_products_of_integers_by_integers(static):
    codes = codes_of(Kind.INT8, 4096, 4096, 4096)
    scale = None if static is None else torch.tensor(static, device="cuda")
    whole = on_device(codes)
    weight = pack_groups(
        Codes(Kind.INT8, whole.values, whole.scale, 4096, inputs=Inputs(scale)), None, LongProducts(), False
    )
    x = torch.randn(70, 4096, device="cuda", dtype=torch.bfloat16)
    q, scales = quantise_rows(x, scale)
    wanted, wanted_scales = quantise_rows_reference(x, scale)
    assert int((q.int() - wanted.int()).abs().max()) <= 1  # a division may round a tie in the other direction
    torch.testing.assert_close(scales, wanted_scales)
    want = q.double() @ whole.values.double().T * scales[:, None] * whole.scale.double().T
    for rows in (1, 16, 70):
        got, direct = weight.linear(x[:rows]), x.new_empty(rows, 4096)
        tile = tile_of(rows, 4096, 4096, Kind.INT8, 4096, 1, 2)
        groups_product(q[:rows], weight.weight, None, None, direct, scales[:rows], tile)
        assert torch.equal(got, direct)
        assert float((got.double() - want[:rows]).norm() / want[:rows].norm()) < LIMIT


FLOATS = {"token": Inputs(kind=Kind.E4M3), "blocks": Inputs(kind=Kind.E4M3, group=128, powers=True)}


@pytest.mark.parametrize("how", [*FLOATS, "number"])
def test_rows_become_fp8(how):
    inputs = FLOATS.get(how) or Inputs(torch.tensor(0.01, device="cuda"), Kind.E4M3)
    x, gain = torch.randn(70, 4096, device="cuda", dtype=torch.bfloat16), torch.rand(4096, device="cuda").bfloat16()
    x[3] = 0
    for normed in (None, gain):
        codes, scales = quantise_floats(x, inputs, normed, 1e-6)
        wanted, wanted_scales = quantise_floats_reference(x, inputs, normed, 1e-6)
        assert int((codes.int() - wanted.int()).abs().max()) <= 1
        assert (codes == wanted).float().mean() > 0.99
        # A norm may round to the neighbouring bfloat16.
        torch.testing.assert_close(scales, wanted_scales, rtol=1e-2, atol=0)
        for first, count in (*((row, 1) for row in range(70)), (3, 16), (5, 33)):
            some = quantise_floats(x[first : first + count], inputs, normed, 1e-6)
            assert torch.equal(some[0], codes[first : first + count])
            assert torch.equal(some[1], scales[:, first : first + count])
    for width in (4096, 12288, 29568):
        halves = torch.randn(70, 2 * width, device="cuda", dtype=torch.bfloat16)
        found = quantise_floats(halves, inputs, activation=Activation.SILU)
        apart = quantise_floats(glu(halves, Activation.SILU), inputs)
        assert torch.equal(found[0], apart[0])
        assert torch.equal(found[1], apart[1])


@pytest.mark.skipif(not target().widens_fp8, reason="no instruction rounds to e4m3")
@pytest.mark.parametrize("how", [*FLOATS, "number"])
def test_an_instruction_rounds_as_the_integers(how):
    """Every finite bfloat16, and midpoints between neighbouring codes."""
    numbers = torch.arange(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = numbers[numbers.isfinite()].view(-1, 510)
    x = torch.cat([x, x.clamp(-600, 600), x.clamp(-0.02, 0.02)])
    inputs = FLOATS.get(how) or Inputs(torch.tensor(1.0, device="cuda"), Kind.E4M3)
    codes, scales = launch_quantise_floats(x, inputs, None, 0, native=True)
    whole, whole_scales = launch_quantise_floats(x, inputs, None, 0, native=False)
    assert torch.equal(codes, whole)
    assert torch.equal(scales, whole_scales)


@pytest.mark.skipif(not target().multiplies_float8, reason="no units for FP8")
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("how", FLOATS)
@pytest.mark.parametrize(("width", "depth"), [(4096, 4096), (1040, 1536), (4096, 12288)])
def test_products_of_fp8_by_fp8_codes(width, depth, how, invariant):
    """By our kernel, and by the library where the library was faster; timed products are captured in a graph."""
    group, inputs, products = 128 if how == "blocks" else depth, FLOATS[how], ScaledProducts()
    codes = on_device(codes_of(Kind.E4M3, width, depth, group, False))
    scale = codes.scale.float()
    if how == "blocks":
        scale = scale[::128].repeat_interleave(128, 0)[:width]
    codes = Codes(Kind.E4M3, codes.values, scale, group, inputs=inputs)
    weight = pack_float8(codes, torch.randn(width, device="cuda"), torch.bfloat16, products, invariant)
    x = torch.randn(300, depth, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(300, width, device="cuda", dtype=torch.bfloat16)
    q, scales = quantise_floats(x, inputs)
    wide = scales.double().T.repeat_interleave(group, 1)[:, :depth]
    want = (q.view(torch.float8_e4m3fn).double() * wide) @ codes.dense().T + weight.bias + residual
    for timed in (False, True):
        for rows in (1, 5, 16, 17, 64, 65, 300):
            runs = [weight.linear(x[:rows], None, residual[:rows]) for _ in range(3)]
            assert float((runs[0].double() - want[:rows]).norm() / want[:rows].norm()) < 4e-3
            assert all(torch.equal(runs[0], again) for again in runs[1:])
            assert not invariant or torch.equal(runs[0][:16], weight.linear(x[:16], None, residual[:16])[:rows])
        if not timed:
            direct, tile = x.new_empty(300, width), float8_tile_of(None if invariant else 300, width, depth, 3)
            float8_product(q, scales, weight.weight, weight.bias, residual, direct, tile)
            assert torch.equal(direct, runs[0])
            products.autotune((32, 64, 128, 300), torch.bfloat16)
            librarys = [rows for rows in (32, 64, 128, 300) if products.is_librarys(rows, width, depth)]
            print(f"FP8 {width} x {depth}, {how}: the library multiplies {librarys} rows")
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(residual)
    with torch.cuda.graph(graph):
        weight.linear(x, out, residual)
    out.zero_()
    graph.replay()
    assert torch.equal(out, weight.linear(x, None, residual))


@pytest.mark.parametrize(("hidden", "inner", "group"), [(4096, 4096, 128), (1536, 1000, 32), (4096, 12288, 128)])
def test_one_row_by_four_bits(hidden, inner, group):
    """A sum that the next norm reads, and a gated product of this norm's output."""
    down = on_device(codes_of(Kind.INT4, hidden, inner, group))
    up = on_device(codes_of(Kind.INT4, 2 * inner, hidden, group, zeros=True))
    up = replace(up, scale=up.scale / 64)
    x = torch.randn(1, inner, device="cuda", dtype=torch.bfloat16)
    stream = torch.randn(1, hidden, device="cuda", dtype=torch.bfloat16)
    gain, weight = torch.rand(hidden, device="cuda") + 0.5, pack_groups(down, None, LongProducts(), False)
    assert one_row_takes(x, weight.weight)
    after = weight.add_then_norm(added := stream.clone(), x, gain, 1e-6)
    assert after is not None
    want = x.double() @ down.dense().T + stream
    assert float((added.double() - want).norm() / want.norm()) < LIMIT
    normed = torch.nn.functional.rms_norm(added.double(), (hidden,), gain.double(), 1e-6)
    want = activate_reference(normed @ up.dense().T, Activation.SILU)
    got = pack_groups(up, None, LongProducts(), False).of_normed(added, gain, 1e-6, after, Activation.SILU)
    assert float((got.double() - want).norm() / want.norm()) < 2 * LIMIT  # the rows are rounded after the gain
    alone = torch.empty_like(added)
    launch_one_row_product(x, weight.weight, None, stream, alone)
    assert torch.equal(alone, added)


@pytest.mark.skipif(not target().multiplies_float8, reason="no units for e4m3")
@pytest.mark.parametrize("cut", [None, RowsCut(3, 2)])
@pytest.mark.parametrize("group", [128, 4096])
def test_one_row_of_fp8_by_fp8(group, cut):
    codes = on_device(codes_of(Kind.E4M3, 1040, 4096, group, False))
    weight = packed(Codes(Kind.E4M3, codes.values, codes.scale.float(), group), words=False)
    x, groups = torch.randint(0, 0x60, (1, 4096), device="cuda", dtype=torch.uint8), 4096 // group
    scales, got = torch.rand(groups, 1, device="cuda") + 0.5, torch.empty(1, 1040, device="cuda", dtype=torch.bfloat16)
    float8_row_product(x, scales, weight, None, None, got, cut)
    wide = x.view(torch.float8_e4m3fn).double() * scales.double().T.repeat_interleave(group, 1)
    want = wide @ weight.dense().T
    assert float((got.double() - want).norm() / want.norm()) < LIMIT


@pytest.mark.skipif(not target().multiplies_float8, reason="no units for e4m3")
@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize(("width", "depth"), [(1040, 512), (1040, 2048), (2048, 4096), (12288, 2048)])
def test_a_few_rows_of_fp8_by_fp8(width, depth, rows):
    """A row has the same bits in any company; in a graph too; the residual may be the output."""
    codes = on_device(codes_of(Kind.E4M3, width, depth, 128, False))
    weight = packed(Codes(Kind.E4M3, codes.values, codes.scale.float(), 128), words=False)
    x = torch.randint(0, 0x60, (rows, depth), device="cuda", dtype=torch.uint8)
    scales = torch.rand(depth // 128, rows, device="cuda") + 0.5
    stream = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    got = torch.empty_like(stream)
    float8_rows_product(x, scales, weight, None, stream, got)
    wide = x.view(torch.float8_e4m3fn).double() * scales.double().T.repeat_interleave(128, 1)
    want = wide @ weight.dense().T + stream
    assert float((got.double() - want).norm() / want.norm()) < LIMIT
    alone = torch.empty_like(got[:2])
    float8_rows_product(x[:2].contiguous(), scales[:, :2].contiguous(), weight, None, stream[:2].contiguous(), alone)
    assert torch.equal(alone, got[:2])
    added = stream.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        float8_rows_product(x, scales, weight, None, added, added)
    added.copy_(stream)
    graph.replay()
    assert torch.equal(added, got)


@pytest.mark.skipif(not target().multiplies_float8, reason="no units for e4m3")
@pytest.mark.parametrize("depth", [512, 2048, 5120, 17408])
@pytest.mark.parametrize("how", ["token", "number", "blocks"])
def test_one_row_that_becomes_fp8(depth, how, monkeypatch):
    """The kernel that quantises its row gives what it gives for codes that another kernel has made."""
    inputs = FLOATS.get(how) or Inputs(torch.tensor(0.01, device="cuda"), Kind.E4M3)
    given = on_device(codes_of(Kind.E4M3, 1040, depth, inputs.group or depth, False))
    codes = Codes(Kind.E4M3, given.values, given.scale.float(), given.group, inputs=inputs)
    weight = pack_float8(codes, torch.randn(1040, device="cuda"), torch.bfloat16, ScaledProducts(), False)
    x, halves = (torch.randn(1, depth * n, device="cuda", dtype=torch.bfloat16) for n in (1, 2))
    gain, stream = torch.rand(depth, device="cuda") + 0.5, torch.randn(1, 1040, device="cuda", dtype=torch.bfloat16)

    def results():
        yield weight.linear(x)
        yield weight.linear(x, residual=stream)
        yield weight.of_halves(halves, Activation.SILU)
        yield weight.of_normed(x, gain, 1e-6, None, None)

    monkeypatch.setattr("engine.kernels.gemm.float8_row.SMALL", 1 << 30)
    assert takes_floats(Floats(halves, inputs, None, 0.0, Activation.SILU), weight.weight)
    got = list(results())
    monkeypatch.setattr("engine.kernels.gemm.float8_weight.takes_floats", lambda *_: False)
    for one, other in zip(got, results(), strict=True):
        assert float((one.double() - other.double()).norm() / other.double().norm()) < LIMIT


@pytest.mark.skipif(not target().multiplies_float8, reason="needs units for e4m3")
def test_one_prescaled_row_that_becomes_fp8_and_rows_of_floats():
    """The row is rounded before it is divided by its root mean square, so some codes are the next ones."""
    given = on_device(codes_of(Kind.E4M3, 1040, 2048, 128, False))
    codes = Codes(Kind.E4M3, given.values, given.scale.float(), 128, inputs=Inputs(kind=Kind.E4M3, group=128))
    weight = pack_float8(codes, None, torch.bfloat16, ScaledProducts(), False)
    x, further = (torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16) for rows in (1, 64))
    gain = torch.rand(2048, device="cuda") + 0.5
    before = Unscaled((x * gain).bfloat16(), x.float().square().view(16, -1).sum(1, keepdim=True), gain, 1e-6)
    want = weight.of_normed(x, gain, 1e-6, None, None)
    both = weight.of_normed_and(further, before)
    assert float((both[:, :1040].double() - want.double()).norm() / want.double().norm()) < 2e-2
    floats = rms_norm(x, gain, 1e-6).double() @ further.double().T
    assert float((both[:, 1040:].double() - floats).norm() / floats.norm()) < 1e-2


@pytest.mark.skipif(target().arch != "sm_90", reason="a kernel for sm_90")
@pytest.mark.parametrize(
    ("width", "depth", "group"),
    [(6144, 4096, 4096), (4100, 4112, 4112), (24576, 4096, 4096), (4096, 12288, 12288), (6144, 4240, 128)],
)
def test_few_rows_of_fp8_by_fp8(width, depth, group):
    """A graph gives the same bits; widths and depths that are no multiples of a tile."""
    codes = on_device(codes_of(Kind.E4M3, width, depth, group, False))
    if group == 128:
        codes = replace(codes, scale=codes.scale[::128].repeat_interleave(128, 0))
    weight = packed(codes, words=False)
    weight = weight if weight.scales is None else replace(weight, blocks=blocks_of(weight.scales))
    dense, bias = weight.dense().double(), torch.randn(width, device="cuda")
    arrivals(weight.codes.device)
    for rows in (1, 2, 16, 17, 32, 48, 64):
        form = FLOATS["token" if weight.scales is None else "blocks"]
        x, scales = quantise_floats(torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16), form)
        assert takes_few(x, weight)
        residual, tile = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16), few_tile_of(rows, width, depth)
        wide = scales.double().T.repeat_interleave(group, 1)[:, :depth]
        want = (x.view(torch.float8_e4m3fn).double() * wide) @ dense.T + bias + residual
        got, graph = torch.full_like(residual, float("nan")), torch.cuda.CUDAGraph()
        float8_few_product(x, scales, weight, bias, residual, got, tile)
        assert float((got.double() - want).norm() / want.norm()) < 4e-3
        first = got.clone()
        with torch.cuda.graph(graph):
            float8_few_product(x, scales, weight, bias, residual, got, tile)
        for _ in range(20):
            got.fill_(float("nan"))
            graph.replay()
            assert torch.equal(got, first)
