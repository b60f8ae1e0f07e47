"""Products, the rotary table and prep kernels on a real GPU; overlapping kernels give the results of separate ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch

from _fast.layout import SLOT_WORDS, UPDATE_WORDS, Header, RowColumn, SlotWord, TokenCode, column_at, tail_at, tokens_at
from engine.kernels.activation import Activation
from engine.kernels.gemm.dense_row import RowCut, dense_row_reference, launch_dense_row
from engine.kernels.gemm.epilogue import Unscaled, empty_unscaled
from engine.kernels.gemm.gated_one_wave import one_wave_product
from engine.kernels.gemm.gated_persistent import gated_product, gated_reference
from engine.kernels.gemm.invariant import invariant_linear
from engine.kernels.gemm.pack import Placement, pack
from engine.kernels.gemm.split_k import split_linear
from engine.kernels.norm import rms_norm, rms_norm_reference
from engine.kernels.pdl import overlaps
from engine.kernels.record import records_in
from engine.kernels.room import MAX_BLOCK, MAX_ROWS, whole_tiles
from engine.kernels.rope import cos_sin, cos_sin_reference
from engine.kernels.sampling.home import send_home
from engine.kernels.step_inputs import step_inputs, step_inputs_reference
from engine.kernels.step_tensors import empty_inputs, empty_slots
from engine.kernels.tune import LEAST_FILL, ONE_ROW, ONE_WAVE, SHAPES, few_rows, many_gated, one_wave_gated
from engine.layers.padded import PaddedGated

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
SILU = Activation.SILU
PLACEMENT = Placement(torch.bfloat16, "cuda")
LIMIT = 8e-3  # bfloat16's rounding


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


@pytest.mark.parametrize("shape", [*SHAPES["sm_90"], (2048, 2048, False), (20000, 640, True)])
def test_few_rows_by_every_cut(shape):
    width, depth, gated = shape
    weight, bias = draw(width * (1 + gated), depth) / 16, draw(width * (1 + gated))
    packed = pack(weight, bias, PLACEMENT)
    for rows in (1, 3, 16, 17, 33, 64, 65, 96, 129, 161, 192, 255, 256):
        x, residual = draw(rows, depth), draw(rows, width)
        both = x.double() @ weight.double().T + bias.double()
        if gated:
            gate, up = both.chunk(2, dim=1)
            want = torch.nn.functional.silu(gate) * up
            runs = [packed.gated(x, SILU) for _ in range(20)]
        else:
            want = both + residual.double()
            runs = [packed.linear(x, None, residual) for _ in range(20)]
        assert error(runs[0], want) < LIMIT * (1 + gated), (rows, few_rows(rows, *shape))
        assert all(torch.equal(runs[0], again) for again in runs[1:])


@pytest.mark.parametrize("shape", [*ONE_ROW["sm_90"], (2050, 2048, False), (1030, 1000, True)])
def test_one_row(shape):
    """With the table's cut or another; with a bias and a norm before, then added to the stream with the next norm."""
    width, depth, gated = shape
    cut, act = ONE_ROW["sm_90"].get(shape, RowCut(2, 256, 1)), SILU if gated else None
    weight, bias = draw(width * (1 + gated), depth) / depth**0.5, draw(width * (1 + gated))
    gain, behind = torch.rand(depth, device="cuda"), torch.rand(width, device="cuda")
    x, start, out, want = draw(1, depth), draw(1, width), draw(1, width), draw(1, width).double()
    before = Unscaled((x * gain).bfloat16(), x.float().square().sum() / 6 * torch.ones(6, 1, device="cuda"), gain, 1e-6)
    launch_dense_row(before.rows, weight, bias, None, out, act, cut, before)
    dense_row_reference(before.rows.double(), weight, bias, None, want, act, cut, before)
    assert error(out, want) < LIMIT
    if gated:
        return
    for _ in range(5):
        out.copy_(start)
        after = Unscaled(torch.empty_like(out), torch.empty(-(-width // cut.block_n), 1, device="cuda"), behind, 1e-6)
        launch_dense_row(x, weight, bias, out, out, None, cut, after=after)
        dense_row_reference(x.double(), weight, bias, start.double(), want, None, cut)
        assert error(out, want) < LIMIT
        assert error(after.rows, want * behind) < LIMIT
        assert error(after.squares.sum(0), want.square().sum(1)) < LIMIT


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "shape", [*LEAST_FILL["sm_90"], (3456, 1280), (1000, 520), (1001, 520), (130, 4096), (257, 99)]
)
def test_gated_products_of_many_rows(shape, biased):
    """Partial tiles of rows, columns and depth; pointers are used for rows that are not aligned to 16 bytes."""
    width, depth = shape
    weight, bias = draw(2 * width, depth) / depth**0.5, draw(2 * width) if biased else None
    for rows in (1, 65, 129, 256, 257, 512, 2048, 2200):
        x, got = draw(rows, depth + 8)[:, :depth], torch.full((rows, width), torch.nan, device="cuda").bfloat16()
        gated_product(x, weight, bias, got, SILU)
        assert error(got, gated_reference(x.double(), weight, bias, None, SILU)) < LIMIT, rows
        again = torch.empty_like(got)
        for _ in range(5):
            gated_product(x, weight, bias, again, SILU)
            assert torch.equal(got, again), rows


@pytest.mark.parametrize("rows", [4, 600, 1664, 5504])
def test_the_gated_product_of_a_tower_ends_in_one_and_zeros(rows):
    """The kernel of many rows runs if it fills whole waves, else the vendor's product and silu."""
    width, depth = 3420, 1280
    gate, up, x = draw(width, depth) / 32, draw(width, depth) / 32, draw(rows, depth)
    biases = draw(width), draw(width)
    layer = PaddedGated(depth, width)
    layer.fill({"weight": [gate, up], "bias": list(biases)}, PLACEMENT)
    got = layer(x)
    want = gated_reference(x.double(), torch.cat([gate, up]), torch.cat(biases), None, SILU)
    assert error(got[:, :width], want) < 2 * LIMIT
    assert (got[:, width] == 1).all()
    assert not got[:, width + 1 :].any()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [*ONE_WAVE["sm_90"], (1000, 520), (96, 64), (152, 4096)])
def test_gated_products_in_one_wave(shape, biased):
    """Partial tiles of rows, columns and depth; rows that are not aligned to 16 bytes use the kernel of many rows."""
    if not overlaps():
        pytest.skip("no loads by descriptors")
    width, depth = shape
    weight, bias = draw(2 * width, depth) / depth**0.5, draw(2 * width) if biased else None
    packed = pack(weight, bias, PLACEMENT)
    for rows in (1, 65, 96, 127, 128):
        for extra in (8, 3):
            x, got = draw(rows, depth + extra)[:, :depth], draw(rows, width).fill_(torch.nan)
            want = gated_reference(x.double(), weight, bias, None, SILU)
            one_wave_product(x, weight, bias, got, SILU)
            assert error(got, want) < LIMIT, (rows, extra)
            again = torch.empty_like(got)
            for _ in range(5):
                one_wave_product(x, weight, bias, again, SILU)
                assert torch.equal(got, again), (rows, extra)
            limit = LIMIT
            if not (few_rows(rows, *shape, True) or one_wave_gated(rows, *shape) or many_gated(rows, *shape)):
                # Both factors contain the error of the vendor's product, which may split the depth into parts.
                product = torch.nn.functional.linear(
                    x.double(), weight.double(), None if bias is None else bias.double()
                )
                lost = error(packed.linear(x), product)
                assert lost < LIMIT, (rows, extra)
                limit += 2 * lost
            assert error(packed.gated(x, SILU), want) < limit, (rows, extra, one_wave_gated(rows, *shape))


@pytest.mark.parametrize("shape", LEAST_FILL["sm_90"])
def test_gated_products_of_many_rows_by_the_table(shape):
    width, depth = shape
    weight, x = draw(2 * width, depth) / depth**0.5, draw(2048, depth)
    packed = pack(weight, None, PLACEMENT)
    want = gated_reference(x.double(), weight, None, None, SILU)
    for rows in (512, 640, 768, 1024, 1500, 2048):
        assert error(packed.gated(x[:rows], SILU), want[:rows]) < LIMIT, (rows, many_gated(rows, *shape))


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 64, 65, 96, 129, 161, 192, 255, 256])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("before", "hidden", "after"),
    [(2048, 1024, 4096), (3072, 1024, 3072), (4096, 4096, 12288), (12288, 4096, 6144), (3584, 3584, 4608)],
)
def test_a_norm_between_products_of_few_rows(before, hidden, after, gated, rows):
    first, second = draw(hidden, before) / 16, draw(after * (1 + gated), hidden) / 16
    biases, gain = (draw(hidden), draw(len(second))), torch.randn(hidden, device="cuda")
    packed, then = pack(first, biases[0], PLACEMENT), pack(second, biases[1], PLACEMENT)
    activation = SILU if gated else None
    x, start = draw(rows, before), draw(rows, hidden) * 30

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        residual = start.clone()
        prescaled = packed.add_then_norm(residual, x, gain, 1e-6)
        return residual, then.of_normed(residual, gain, 1e-6, prescaled, activation)

    residual, got = run()
    assert error(residual, start.double() + x.double() @ first.double().T + biases[0].double()) < LIMIT
    want = rms_norm_reference(residual.double(), gain.double(), 1e-6) @ second.double().T + biases[1].double()
    if gated:
        gate, up = want.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
    assert error(got, want) < LIMIT * (1 + gated)
    assert all(torch.equal(got, run()[1]) for _ in range(20))


@pytest.mark.parametrize("rows", [65, 72, 96, 127, 129, 160, 161, 192, 255])
@pytest.mark.parametrize("shape", [shape for shape, choice in SHAPES["sm_90"].items() if len(choice) > 3])
def test_what_lies_behind_the_rows_of_a_product_changes_no_bit(shape, rows):
    width, depth, gated = shape
    cut = few_rows(rows, *shape)
    if cut is None:
        pytest.skip("this card takes the vendor's product for so many rows, and no tiles of ours")
    assert rows > MAX_ROWS
    assert cut.block_m
    weight, gain = draw(width * (1 + gated), depth) / depth**0.5, torch.randn(width, device="cuda")
    x, start = draw(rows, depth), draw(rows, width)
    room = draw(256, depth).fill_(torch.nan)[:rows].copy_(x)
    assert len(whole_tiles(x, MAX_BLOCK)) == rows < len(whole_tiles(room, MAX_BLOCK))
    want, got = torch.empty_like(start), torch.full((256, width), torch.nan, device="cuda").bfloat16()
    for _ in range(10):
        afters = []
        for tokens, out in ((x, want), (room, got[:rows])):
            residual = None if gated else out.copy_(start)
            afters.append(None if gated else empty_unscaled(out, cut.block_n, gain, 1e-6))
            split_linear(tokens, weight, None, residual, out, SILU if gated else None, cut, after=afters[-1])
        assert torch.equal(got[:rows], want)
        assert got[rows:].isnan().all()
        if not gated:
            for mine, theirs in zip(afters[1][:2], afters[0][:2]):
                assert torch.equal(mine, theirs)
    y = x.double() @ weight.double().T
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    assert error(want, y if gated else y + start.double()) < LIMIT * (1 + gated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "depth"), [(4096, 1024), (9000, 520), (1024, 3072)])
def test_invariant_products_have_the_same_bits_in_any_company(width, depth, dtype):
    weight, x, bias = draw(width, depth, dtype=dtype), draw(700, depth, dtype=dtype), draw(width, dtype=dtype)
    packed = pack(weight, bias, Placement(dtype, "cuda", invariant=True))
    for op in (packed.linear, partial(packed.gated, activation=SILU)):
        whole = op(x)
        for first, last in ((0, 1), (5, 8), (100, 117), (0, 130), (699, 700), (300, 557)):
            assert torch.equal(op(x[first:last]), whole[first:last])
    got = torch.empty(700, width, dtype=dtype, device="cuda")
    invariant_linear(x, weight, bias, None, got)
    assert torch.equal(packed.linear(x), got)
    assert error(got, x.double() @ weight.double().T + bias.double()) < LIMIT


@pytest.mark.parametrize("sections", [None, (16, 24, 24), (16, 16, 16, 16)])
def test_rotary_table(sections):
    positions = torch.randint(0, 300000, (len(sections or "abc"), 500), device="cuda")[:, :77]
    inv_freq = (1.0 / 1e6 ** (torch.arange(64) / 64)).cuda()
    got = cos_sin(positions, inv_freq, sections, 1.25)
    for mine, theirs in zip(got, cos_sin_reference(positions.cpu(), inv_freq.cpu(), sections, 1.25)):
        assert float((mine.cpu() - theirs).abs().max()) < 2e-6


@pytest.mark.parametrize(("axes", "bidirectional"), [(1, False), (3, False), (1, True), (4, False)])
def test_step_inputs(axes, bidirectional):
    max_rows, max_tokens, updates, params, lines = 256, 2048, 9000, 250, 300
    tail = tail_at(max_rows, max_tokens)
    params_at = tail + UPDATE_WORDS * updates
    at = params_at + SLOT_WORDS * params
    record = torch.zeros(-(-(at + 4 * 1900) // 16) * 16 + 32, dtype=torch.int32)
    counts = {Header.NUM_ROWS: 200, Header.NUM_TOKENS: 1900, Header.NUM_UPDATES: updates, Header.NUM_PARAMS: params}
    for place, value in (counts | {Header.POSITIONS_AT: at}).items():
        record[place] = value
    starts = torch.cat([torch.tensor([0]), torch.randperm(1899)[:199].sort().values + 1, torch.tensor([1900])])
    column = {one: record[column_at(one, max_rows) :] for one in RowColumn}
    column[RowColumn.SLOT][:200] = torch.randperm(lines)[:200]
    column[RowColumn.START][:201], column[RowColumn.LEN][:200] = starts, starts.diff()
    column[RowColumn.COMPUTED][:200] = torch.randint(0, 900, (200,))
    column[RowColumn.FLAGS][:200] = torch.randint(0, 4, (200,))
    record[tokens_at(max_rows) :][:1900] = torch.randint(-20, 150020, (1900,))
    places = torch.randperm(lines * 120)[:updates]
    entries = record[tail:params_at].view(updates, UPDATE_WORDS)
    entries[:, 0], entries[:, 1], entries[:, 2] = places // 120, places % 120, torch.randint(0, 9999, (updates,))
    words = record[params_at:at].view(params, SLOT_WORDS)
    words.copy_(torch.randint(0, 1 << 30, (params, SLOT_WORDS)))
    words[:, SlotWord.SLOT], words[:, SlotWord.OUTSIDE] = torch.randperm(lines)[:params], 0
    words[:, SlotWord.PROMPT_LEN] = torch.randint(0, 1000, (params,))
    record[at : at + 7600] = torch.randint(0, 5000, (7600,))
    mine, theirs = empty_slots(lines, 120, 1, "cuda"), empty_slots(lines, 120, 1, "cpu")
    got, want = (empty_inputs(max_rows, max_tokens, 1, axes, device, bidirectional) for device in ("cuda", "cpu"))
    both = [records_in(record.repeat(2, 1).pin_memory(), device) for device in ("cuda", "cpu")]
    for _ in range(3):
        step_inputs(got, mine, both[0], max_rows, max_tokens, 16, 150000)
        step_inputs_reference(want, theirs, both[1], max_rows, max_tokens, 16, 150000)
    assert both[0].turn.tolist() == both[1].turn.tolist() == [1]
    for ours, plain in ((got, want), (mine, theirs)):
        for name in (
            field.name for field in dataclasses.fields(ours) if isinstance(getattr(plain, field.name), torch.Tensor)
        ):
            assert torch.equal(getattr(ours, name).cpu(), getattr(plain, name)), name


def test_a_graph_sends_tokens_home_to_another_buffer_each_time():
    rows = 300
    ring = torch.zeros(3 * rows, dtype=torch.int32, pin_memory=True).view(3, rows, 1)
    tokens = torch.zeros(rows, 1, dtype=torch.int32, device="cuda")
    home = torch.zeros(1, dtype=torch.int32, device="cuda")
    row_slot = torch.randperm(rows, dtype=torch.int32, device="cuda")
    slots = empty_slots(rows, 1, 1, "cuda")
    send_home(ring, tokens, home, row_slot, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        send_home(ring, tokens, home, row_slot, slots)
    for step in range(12):
        tokens.fill_(step)
        home.fill_(step % 3)
        graph.replay()
        there = torch.cuda.Event(blocking=True)
        there.record()
        there.synchronize()
        assert ring[step % 3, :, 0].tolist() == [step] * rows
        assert ring[(step + 1) % 3, :, 0].tolist() == [max(0, step - 2)] * rows
    slots.word(SlotWord.OUTSIDE)[row_slot[5]] = 1
    graph.replay()
    torch.cuda.synchronize()
    assert ring[2, :, 0].tolist() == [11] * 5 + [int(TokenCode.OUTSIDE)] + [11] * (rows - 6)


@pytest.mark.parametrize("rows", [1, 24, 64, 200, 2048])
def test_a_graph_of_kernels_that_overlap_repeats_its_bits(rows):
    """Every value is read right after it was written: a kernel that does not wait gives another result."""
    assert overlaps() == (torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9)
    hidden, inner = 1024, 3072
    shapes = ((hidden, hidden, 32), (2 * inner, hidden, 32), (hidden, inner, 50))
    layers = [
        (
            *(pack(draw(*size) / scale, None, PLACEMENT) for *size, scale in shapes),
            draw(hidden).float() / 4,
        )
        for _ in range(6)
    ]
    start, residual = draw(rows, hidden), draw(rows, hidden)

    def run(pause: Callable[[], None] = lambda: None) -> torch.Tensor:
        residual.copy_(start)
        prescaled = None
        for first, gate_up, down, weight in layers:
            y = first.of_normed(residual, weight, 1e-6, prescaled, None)
            pause()
            prescaled = first.add_then_norm(residual, y, weight, 1e-6)
            pause()
            y = gate_up.of_normed(residual, weight, 1e-6, prescaled, SILU)
            pause()
            prescaled = down.add_then_norm(residual, y, weight, 1e-6)
            pause()
        return rms_norm(residual, weight, 1e-6)

    want = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(300):
        graph.replay()
        assert torch.equal(got, want)
