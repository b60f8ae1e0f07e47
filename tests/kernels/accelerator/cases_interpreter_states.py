"""Compares kernels of state layers in the interpreter with the recurrence in float64, on poisoned pages."""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (before any kernel file)

from engine.kernels.state import conv
from engine.kernels.state.chunks import chunks_reference, empty_work, fill_work, listed
from engine.kernels.state.conv import launch_conv
from engine.kernels.state.delta import DeltaShape, cut, delta_rule_reference
from engine.kernels.state.delta_prepare import SIZE
from engine.kernels.state.delta_rule import launch_delta_rule
from engine.kernels.state.delta_step import launch_delta_step
from engine.kernels.state.selective import (
    SelectiveInputs,
    SelectiveShape,
    selective_conv_reference,
    selective_scan_reference,
)
from engine.kernels.state.selective_kernel import launch_selective
from engine.kernels.state.ssd import SsdShape, ssd_reference
from engine.kernels.state.ssd_rule import launch_ssd
from tests.kernels.states import (
    Row,
    delta_weights,
    drawn_cache,
    history,
    meta_of,
    selective_weights,
    ssd_weights,
)

SHORT = [Row(0, 1), Row(15, 17), Row(37, 38, 16, 32), Row(20, 24, 16), Row(0, 18, 0, 16), Row(33, 34, 16, 32)]
LONG = [Row(0, 70, 0, 64), Row(20, 151, 16, 144, (64, 128)), Row(0, 2), Row(17, 18, 0, 0), Row(33, 50, 32, 48, (48,))]


def compared(rows, shape, width, reference, launch, weights, padding=2):
    """Compares the kernels with the reference in float64: outputs, and all parts in the pages.

    `width`: columns of the product.
    """
    torch.manual_seed(0)
    count = sum(row.end - row.start for row in rows)
    parts, tail = shape.parts(torch.float32, torch.float32)
    cache, table = drawn_cache(parts, tail, shape.ring, 8 * len(rows))
    meta = meta_of(rows, table, padding)
    before = history(rows, meta)
    reference(torch.randn(int(before.query_start[-1]), width), weights, shape, cache, before)
    projected = torch.randn(count + 3, width)
    want_cache = cut(cache.pages.clone(), parts, tail, shape.ring)
    want = reference(projected.double(), weights, shape, want_cache, meta)
    got = launch(projected, weights, shape, cache, meta)
    assert (got[:count] - want[:count]).abs().max() < 2e-4 * max(1.0, float(want.abs().max()))
    assert_same_pages(cache.pages, want_cache.pages)


def assert_same_pages(got, want):
    """The same numbers are still poison, and all other numbers are equal."""
    got, want = got[1:].view(torch.float32), want[1:].view(torch.float32)  # padded rows may write block 0
    assert torch.equal(got.isnan(), want.isnan())
    assert (got - want).nan_to_num(0.0).abs().max() < 2e-4


def delta(projected, weights, shape, cache, meta):
    return launch_delta_rule(projected, weights, shape, cache, replace(meta, decode_only=shape.per_channel))


@pytest.mark.parametrize("per_channel", [False, True])
def test_delta_steps(per_channel):
    shape = DeltaShape(2, 4, 16, 8, 4, 24, per_channel=per_channel, sigmoid=per_channel)
    compared(SHORT, shape, shape.columns[-1], delta_rule_reference, delta, delta_weights(shape))


APART = {"slots": 2, "parts": 4, "INLINE": False}  # folds in programs of their own
INLINE = {"slots": 0, "parts": 1, "INLINE": True, "PIECE": 16}
FOLDS = [Row(18 + n, 19 + n, 0, 16) for n in range(2)] + [Row(35 + n, 36 + n, 16, 32) for n in range(3)]
LATE = [Row(0, 18, 0, 16), Row(30, 34, 16, 32)]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([FOLDS[0], LATE[0], Row(37, 39, 0, 32), *FOLDS[1:], Row(3, 4), LATE[1]], {**APART, "AHEAD": False}),
        ([FOLDS[0], LATE[0], Row(37, 39, 0, 32), FOLDS[2], Row(3, 4), LATE[1]], {**INLINE, "AHEAD": False}),
        ([Row(3, 4), Row(20, 24, 16), Row(37, 38, 16)], {**APART, "AHEAD": True}),
        ([Row(3, 4), Row(20, 24, 16), Row(37, 38, 16), FOLDS[2]], {**APART, "AHEAD": True}),
        ([Row(3, 4), FOLDS[2]], {**INLINE, "AHEAD": True}),
    ],
)
def test_delta_folds(rows, options):
    """More rows fold than slots, or none; tiles do not divide a head; one row folds 32 positions, two their own."""
    shape = DeltaShape(1, 2, 40, 72, 4, 40)

    def launch(projected, weights, shape, cache, meta):
        out = projected.new_empty(len(projected), shape.value_width)
        launch_delta_step(projected, weights, shape, cache, meta, out, options)
        return out

    compared(rows, shape, shape.columns[-1], delta_rule_reference, launch, delta_weights(shape), padding=3)


@pytest.mark.full
def test_delta_folds_of_many_rows():
    """A program reads the plans of 256 rows at once; one of them folds, and two behind them."""
    rows, shape = [FOLDS[1]] + [Row(0, 0)] * 256 + [Row(2, 3), FOLDS[0], FOLDS[2]], DeltaShape(1, 1, 16, 16, 4, 24)
    compared(rows, shape, shape.columns[-1], delta_rule_reference, delta, delta_weights(shape))


def test_delta_scans():
    shape = DeltaShape(1, 2, 16, 24, 4, 20)
    compared(LONG, shape, shape.columns[-1], delta_rule_reference, delta, delta_weights(shape))


@pytest.mark.parametrize(
    ("rows", "norm"), [(SHORT, "behind gate"), (LONG, "before gate"), (SHORT[:2], "none"), (SHORT[:2], "bare")]
)
def test_ssd(rows, norm, monkeypatch):
    """A step of short rows launches the convolution and the step, nothing else."""
    shape = SsdShape(4, 16, 2, 24, 4, 24, norm)
    short = rows is not LONG
    if short:
        monkeypatch.setattr(conv, "before_kernel", None)

    def launch(projected, weights, shape, cache, meta):
        return launch_ssd(projected, weights, shape, cache, replace(meta, decode_only=short))

    compared(rows, shape, shape.columns[-1], ssd_reference, launch, ssd_weights(shape))


def selective(projected, weights, shape, cache, meta, convolve, scan):
    """Calls both functions; inputs of `scan` are computed from the result of `convolve`."""
    x = convolve(projected, weights, shape, cache, meta)
    mixed = projected[:, : 2 * shape.state_size].sin()
    z, steps = projected[:, shape.inner :], (x * 0.5).roll(1, 1)
    given = SelectiveInputs(x, steps, mixed[:, : shape.state_size], mixed[:, shape.state_size :], z)
    return scan(given, projected, weights, shape, cache, meta)


def selective_reference(*args):
    def scan(given, _, *rest):
        return selective_scan_reference(given, *rest)

    return selective(*args, selective_conv_reference, scan)


def launched_selective(*args):
    def convolve(projected, weights, shape, cache, meta):
        return launch_conv(projected, weights.taps, weights.bias, cache, meta, shape.ring, (0, shape.inner))

    def scan(given, projected, weights, shape, *rest):
        return launch_selective(given, projected[:, : shape.inner], weights, shape, *rest)

    return selective(*args, convolve, scan)


@pytest.mark.parametrize("rows", [SHORT, [Row(0, 1), Row(17, 71, 16, 64, (48,)), Row(0, 30, 0, 16)]])
def test_selective(rows):
    shape = SelectiveShape(72, 6, 4, 24)
    compared(rows, shape, 2 * shape.inner, selective_reference, launched_selective, selective_weights(shape))


def test_chunks():
    parts, tail = DeltaShape(1, 1, 16, 16, 4, 20).parts(torch.float32, torch.float32)
    _, table = drawn_cache(parts, tail, 20, 8 * len(LONG))
    meta = meta_of(LONG, table, 2)
    work = empty_work(len(meta.base), int(meta.query_start[-1]), SIZE, "cpu")
    fill_work(work, meta, 20, SIZE)
    assert listed(work) == chunks_reference(meta, 20, SIZE)
