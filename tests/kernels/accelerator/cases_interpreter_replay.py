"""Replayed states in the interpreter: no bit of a row depends on the cuts between its steps, or on other rows.

Each rule computes a sequence at once and in steps around the border of a chunk. The result at once is also compared
with the recurrence in float64, and the columns that a replay gathers with its reference.
"""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (before any kernel file)

from engine.kernels.state.conv import launch_conv
from engine.kernels.state.delta import DeltaShape, cut, delta_rule_reference
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
from tests.kernels.states import Row, delta_weights, drawn_cache, meta_of, selective_weights, ssd_weights
from tests.layers.state_rows import Sequence, in_steps

LENGTH = 75
CUTS = ([64, 11], [63, 1, 1, 10])
FULL = ([59, 7, 9], in_steps(LENGTH, 1), in_steps(LENGTH, 7))


def selective(projected, weights, shape, cache, meta):
    """Mamba-1's convolution and recurrence; functions of the columns replace the products between them."""
    x = launch_conv(projected, weights.taps, weights.bias, cache, meta, shape.ring, (0, shape.inner))
    return launch_selective(given_by(x, projected, shape), projected[:, : shape.inner], weights, shape, cache, meta)


def selective_reference(projected, weights, shape, cache, meta):
    x = selective_conv_reference(projected, weights, shape, cache, meta)
    return selective_scan_reference(given_by(x, projected, shape), weights, shape, cache, meta)


def given_by(x, projected, shape):
    b, c = projected[:, : 2 * shape.state_size].sin().split(shape.state_size, 1)
    return SelectiveInputs(x, x * 0.5, b, c, projected[:, shape.inner :])


DELTA = DeltaShape(1, 2, 16, 16, 4, 66, exact=True)
SSD = SsdShape(2, 16, 1, 16, 4, 66, exact=True)
SELECTIVE = SelectiveShape(40, 6, 4, 20, exact=True)
RULES = {
    "delta": (DELTA, DELTA.columns[-1], launch_delta_rule, delta_rule_reference, delta_weights(DELTA)),
    "ssd": (SSD, SSD.columns[-1], launch_ssd, ssd_reference, ssd_weights(SSD)),
    "selective": (SELECTIVE, 80, selective, selective_reference, selective_weights(SELECTIVE)),
}
REPLAYED = ("delta", "ssd")


def sequence(name, state=torch.float32):
    shape, _, launch, _, weights = RULES[name]
    parts, tail = shape.parts(torch.float32, state)

    def call(x, meta, pages):
        return launch(x, weights, shape, cut(pages, parts, tail, shape.ring), meta)

    return Sequence(call, parts, tail, SIZE if name in REPLAYED else 16, shape.ring)


@pytest.mark.parametrize(
    ("state", "ways"),
    [
        (torch.float32, CUTS),
        pytest.param(torch.bfloat16, CUTS, marks=pytest.mark.full),
        pytest.param(torch.float32, FULL, marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_cuts_change_no_bit(name, state, ways):
    torch.manual_seed(0)
    x = torch.randn(LENGTH, RULES[name][1])
    whole = sequence(name, state).prompt(x, [LENGTH])
    for cuts in ways:
        assert torch.equal(sequence(name, state).prompt(x, cuts), whole), cuts[:2]


@pytest.mark.parametrize("name", REPLAYED)
def test_replays_equal_the_recurrence(name):
    torch.manual_seed(0)
    shape, width, _, reference, weights = RULES[name]
    other = replace(shape, exact=False)
    x, parts = torch.randn(LENGTH, width), other.parts(torch.float32, torch.float32)

    def call(x, meta, pages):
        return reference(x.double(), weights, other, cut(pages, *parts, shape.ring), meta)

    want = Sequence(call, *parts, SIZE, shape.ring).prompt(x, [LENGTH])
    got = sequence(name).prompt(x, [LENGTH])
    assert (got - want).abs().max() < 2e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.full
def test_other_rows_change_no_bit():
    """Two steps of three rows; each row equals the row alone."""
    torch.manual_seed(0)
    shape, width, launch, _, weights = RULES["delta"]
    parts, tail = shape.parts(torch.float32, torch.float32)
    first = [Row(0, 70, 0, 64), Row(0, 5), Row(0, 64)]
    second = [Row(70, 71, 64), Row(5, 7), Row(64, 65, 0, 64)]
    cache, table = drawn_cache(parts, tail, shape.ring, 8 * len(first))
    xs, found = [torch.randn(row.end, width) for row in second], []
    for rows in (first, second):
        x = torch.cat([each[row.start : row.end] for row, each in zip(rows, xs)])
        meta = meta_of(rows, table, 1)
        if rows is second:  # the first step's new base is the second step's base
            meta.base_run[0] = meta_of(first, table).write_run[0]
        own = launch(torch.cat([x, x[:2]]), weights, shape, cache, meta)
        found.append(own.split([row.end - row.start for row in rows] + [2])[: len(rows)])
    for one, two, x, row in zip(*found, xs, first):
        assert torch.equal(torch.cat([one, two]), sequence("delta").prompt(x, [row.end, len(x) - row.end]))


def test_gathered_columns():
    """Positions from the base on: the first from the ring, the others from the step."""
    torch.manual_seed(0)
    parts, tail = SSD.parts(torch.float32, torch.float32)
    rows = [Row(70, 73, 64), Row(3, 4), Row(0, 2), Row(64, 65, 0, 64), Row(9, 150, 0, 128)]
    cache, table = drawn_cache(parts, tail, SSD.ring, 8 * len(rows), 512)
    cache.pages[:] = torch.randn(cache.pages.shape[0], 128).view(torch.uint8)
    meta, x = meta_of(rows, table, 2), torch.randn(155, SSD.columns[-1])
    again = replayed(meta, len(x), SSD.ring, SIZE)
    want = replay_reference(x, SSD.tail_columns, SSD.ring, cache, meta)
    got = launch_replay(x, SSD.tail_columns, SSD.ring, cache, meta, again)
    count = int(again.query_start[-1])
    assert count == 9 + 4 + 2 + 65 + 150
    assert torch.equal(got[:count], want[:count])
