"""Compares kernels of state layers on an accelerator, in a model's dtype, with the recurrence in float64."""

import pytest
import torch

from engine.kernels.record import records_in
from engine.kernels.state.chunks import chunks_reference, empty_work, fill_work, listed
from engine.kernels.state.conv import launch_conv
from engine.kernels.state.delta import DeltaShape, DeltaWeights, cut, delta_rule_reference
from engine.kernels.state.delta_prepare import SIZE
from engine.kernels.state.delta_rule import launch_delta_rule
from engine.kernels.state.replay import launch_replay, replay_reference, replayed
from engine.kernels.state.selective import (
    SelectiveInputs,
    SelectiveShape,
    selective_conv_reference,
    selective_scan_reference,
)
from engine.kernels.state.selective_kernel import launch_selective
from engine.kernels.state.ssd import SsdShape, ssd_reference
from engine.kernels.state.ssd_rule import launch_ssd
from engine.kernels.state_inputs import state_inputs, state_inputs_reference
from tests.kernels.state_plans import StatePlans, same
from tests.kernels.states import Row, delta_weights, drawn_cache, history, meta_of, on, selective_weights, ssd_weights
from tests.layers.state_rows import Sequence, in_steps

pytestmark = pytest.mark.gpu
ROWS = [Row(0, 1), Row(15, 17), Row(33, 34, 16, 32), Row(20, 151, 16, 144, (64, 128)), Row(0, 70, 0, 64), Row(0, 18)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule(dtype):
    torch.manual_seed(0)
    shape = DeltaShape(2, 4, 128, 128, 4, 20)
    parts, tail = shape.parts(dtype, torch.float32)
    cache, table = drawn_cache(parts, tail, shape.ring, 8 * len(ROWS), 8192)
    meta, weights = meta_of(ROWS, table, 2), delta_weights(shape)
    before = history(ROWS, meta)
    delta_rule_reference(
        torch.randn(int(before.query_start[-1]), shape.columns[-1]).to(dtype), weights, shape, cache, before
    )
    count = sum(row.end - row.start for row in ROWS)
    projected, pages = torch.randn(count, shape.columns[-1]).to(dtype), cache.pages.cuda()
    held = DeltaWeights(*(getattr(weights, name).cuda() for name in DeltaWeights.__slots__))
    got = launch_delta_rule(projected.cuda(), held, shape, cut(pages, parts, tail, shape.ring), on(meta, "cuda"))
    want = delta_rule_reference(projected.double(), weights, shape, cache, meta)
    limit = 1e-4 if dtype is torch.float32 else 1.5e-2
    assert (got.double().cpu() - want).norm() / want.norm() < limit
    for row, run in enumerate(meta.write_run.tolist()):
        if run:
            mine, theirs = (cache.state[0].read(each, table[run]) for each in (pages.cpu(), cache.pages))
            assert (mine - theirs).norm() / theirs.norm() < limit, row


@pytest.mark.parametrize("norm", ["behind gate", "none", "bare"])
def test_ssd(norm):
    torch.manual_seed(0)
    shape = SsdShape(8, 64, 2, 128, 4, 20, norm)
    check(shape, shape.columns[-1], ssd_reference, launch_ssd, ssd_weights(shape))


def selective(projected, weights, shape, cache, meta, scan, x=None):
    """`x`: the convolution's result, which the tail holds; None: other numbers."""
    if x is None:
        x = projected[:, : shape.inner].tanh().contiguous()
    mixed = projected[:, : 2 * shape.state_size].sin()
    z = projected[:, shape.inner :]
    given = SelectiveInputs(x, x.roll(1, 1), mixed[:, : shape.state_size], mixed[:, shape.state_size :], z)
    return scan(given, projected[:, : shape.inner], weights, shape, cache, meta)


def test_selective():
    torch.manual_seed(0)
    shape = SelectiveShape(256, 16, 4, 20)

    def scan(given, _, *rest):
        return selective_scan_reference(given, *rest)

    def reference(*args):
        selective_conv_reference(*args)
        return selective(*args, scan)

    def launch(*args):
        projected, weights, shape, cache, meta = args
        launch_conv(projected, weights.taps, weights.bias, cache, meta, shape.ring, (0, shape.inner))
        return selective(*args, launch_selective)

    check(shape, 2 * shape.inner, reference, launch, selective_weights(shape))


def moved(weights):
    """Copies weights to the accelerator."""
    found = (getattr(weights, name) for name in type(weights).__slots__)
    return type(weights)(*(each if each is None else each.cuda() for each in found))


def check(shape, width, reference, launch, weights):
    """Compares results in float32, and the states that rows leave."""
    parts, tail = shape.parts(torch.float32, torch.float32)
    cache, table = drawn_cache(parts, tail, shape.ring, 8 * len(ROWS), 8192)
    meta = meta_of(ROWS, table, 2)
    before = history(ROWS, meta)
    reference(torch.randn(int(before.query_start[-1]), width), weights, shape, cache, before)
    projected, pages = torch.randn(sum(row.end - row.start for row in ROWS), width), cache.pages.cuda()
    held = moved(weights)
    got = launch(projected.cuda(), held, shape, cut(pages, parts, tail, shape.ring), on(meta, "cuda"))
    want = reference(projected.double(), weights, shape, cache, meta)
    assert (got.double().cpu() - want).norm() / want.norm() < 1e-4
    for row, run in enumerate(meta.write_run.tolist()):
        if run:
            mine, theirs = (cache.state[0].read(each, table[run]) for each in (pages.cpu(), cache.pages))
            assert (mine - theirs).norm() / theirs.norm() < 1e-4, row


def of_selective(projected, weights, shape, cache, meta):
    x = launch_conv(projected, weights.taps, weights.bias, cache, meta, shape.ring, (0, shape.inner))
    return selective(projected, weights, shape, cache, meta, launch_selective, x)


DELTA, SSD = DeltaShape(2, 4, 128, 128, 4, 66, exact=True), SsdShape(8, 64, 2, 128, 4, 66, exact=True)
SELECTIVE = SelectiveShape(256, 16, 4, 20, exact=True)
RULES = {
    "delta": (DELTA, DELTA.columns[-1], 64, launch_delta_rule, delta_weights(DELTA)),
    "ssd": (SSD, SSD.columns[-1], 64, launch_ssd, ssd_weights(SSD)),
    "selective": (SELECTIVE, 512, 16, of_selective, selective_weights(SELECTIVE)),
}


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_cuts_change_no_bit(name, dtype, state):
    """Exact layers: steps of 1, 7, 64 tokens leave the results of one step."""
    torch.manual_seed(0)
    shape, width, chunk, launch, weights = RULES[name]
    parts, tail, held = *shape.parts(dtype, state), moved(weights)

    def results(cuts):
        def call(x, meta, pages):
            return launch(x, held, shape, cut(pages, parts, tail, shape.ring), meta)

        return Sequence(call, parts, tail, chunk, shape.ring, "cuda", 8192).prompt(x, cuts)

    x = torch.randn(200, width, device="cuda").to(dtype)
    whole = results([200])
    assert whole.isfinite().all()
    for size in (1, 7, 64):
        assert torch.equal(results(in_steps(200, size)), whole), size


def test_gathered_columns():
    torch.manual_seed(0)
    rows = [Row(70, 73, 64), Row(3, 4), Row(0, 2), Row(64, 65, 0, 64), Row(9, 150, 0, 128)]
    parts, tail = SSD.parts(torch.float32, torch.float32)
    cache, table = drawn_cache(parts, tail, SSD.ring, 8 * len(rows), 8192)
    cache.pages[:] = torch.randn(len(cache.pages), 2048).view(torch.uint8)
    x, meta = torch.randn(155, SSD.columns[-1]), meta_of(rows, table, 2)
    again, count = replayed(on(meta, "cuda"), len(x), SSD.ring, SIZE), 230
    held = cut(cache.pages.cuda(), parts, tail, SSD.ring)
    got = launch_replay(x.cuda(), SSD.tail_columns, SSD.ring, held, on(meta, "cuda"), again)
    want = replay_reference(x, SSD.tail_columns, SSD.ring, cache, meta)
    assert torch.equal(got[:count].cpu(), want[:count])


def test_chunks():
    parts, tail = DeltaShape(1, 1, 16, 16, 4, 20).parts(torch.float32, torch.float32)
    _, table = drawn_cache(parts, tail, 20, 8 * len(ROWS))
    meta = on(meta_of(ROWS, table, 2), "cuda")
    work = empty_work(len(meta.base), int(meta.query_start[-1]), SIZE, "cuda")
    fill_work(work, meta, 20, SIZE)
    assert listed(work) == chunks_reference(on(meta, "cpu"), 20, SIZE)


def test_runs_and_rows_of_a_step():
    walk = StatePlans(1)
    mine, theirs = walk.tables("cuda"), walk.tables()
    records = records_in(torch.full((2, len(walk.record)), -7, dtype=torch.int32).pin_memory(), "cuda")
    for number, _ in enumerate(walk.steps(20)):
        records.turn.fill_(number % 2)
        records.pinned[number % 2] = torch.from_numpy(walk.record)
        state_inputs(mine, records, walk.sizes)
        torch.cuda.synchronize()
        state_inputs_reference(theirs, torch.from_numpy(walk.record), walk.sizes)
        assert same(mine, theirs)
