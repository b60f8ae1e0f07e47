"""C kernels of layers with states equal the recurrence in float64; bits do not depend on other rows or on cuts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from _fast import cpu
from engine.attention.state_meta import StateMeta
from engine.kernels.state.delta import DeltaShape, StatePages, cut, delta_rule_reference
from engine.kernels.state.host import delta_rule_on_host, selective_conv_on_host, selective_scan_on_host, ssd_on_host
from engine.kernels.state.selective import (
    SelectiveInputs,
    SelectiveShape,
    selective_conv_reference,
    selective_scan_reference,
)
from engine.kernels.state.ssd import SsdShape, ssd_reference
from tests.kernels.states import Row, delta_weights, drawn_cache, history, meta_of, selective_weights, ssd_weights
from tests.layers.state_rows import Sequence, in_steps

pytestmark = pytest.mark.usefixtures("isa")
RING = 6
ROWS = [Row(0, 1), Row(7, 9, 5, 7), Row(9, 10, 9), Row(4, 23, 3, 21, (8, 9, 16)), Row(0, 12, 0, 11), Row(3, 6, 1)]
Rule = Callable[[Tensor, Any, Any, StatePages, StateMeta], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A rule with a shape; `exact` is the reference."""

    shape: Any
    width: int  # columns of the products
    weights: Callable[[Any], Any]
    host: Rule
    exact: Rule


def selective(conv: Rule, scan: Callable[..., Tensor]) -> Rule:
    """Joins both functions of Mamba-1; takes steps, B and C from `projected` instead of computing products."""

    def run(projected: Tensor, weights: Any, shape: Any, cache: StatePages, meta: StateMeta) -> Tensor:
        x, mixed = projected[:, : shape.inner].clamp(-1, 1), projected[:, 3 : 3 + 2 * shape.state_size].clamp(-2, 2)
        z = projected[:, shape.inner :]
        b, c = mixed.split(shape.state_size, 1)
        given = SelectiveInputs(x, z.roll(1, 1), b, c, z)
        active = conv(projected, weights, shape, cache, meta)
        return torch.cat([active, scan(given, weights, shape, cache, meta)], 1)

    return run


def delta(**numbers: Any) -> Case:
    shape = DeltaShape(2, 4, 20, 72, 4, RING, **numbers)
    return Case(shape, shape.columns[-1], delta_weights, delta_rule_on_host, delta_rule_reference)


def mamba2(groups: int, norm: Any) -> Case:
    shape = SsdShape(6, 24, groups, 40, 4, RING, norm)
    return Case(shape, shape.columns[-1], ssd_weights, ssd_on_host, ssd_reference)


SELECTIVE = (
    selective(selective_conv_on_host, selective_scan_on_host),
    selective(selective_conv_reference, selective_scan_reference),
)
CASES = {
    "gates of heads": delta(),
    "gates of channels": delta(per_channel=True, sigmoid=True),
    "norm behind": mamba2(2, "behind gate"),
    "norm before": mamba2(3, "before gate"),
    "no norm": mamba2(1, "none"),
    "neither norm nor gate": mamba2(1, "bare"),
    "selective": Case(SelectiveShape(72, 16, 4, RING), 144, selective_weights, *SELECTIVE),
}
F32, BF16 = torch.float32, torch.bfloat16
TYPES = [(F32, F32), (BF16, F32), (BF16, BF16)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step of ROWS; `pages`: before the step; `after`, `want`: pages and results of the reference in float64."""

    projected: Tensor
    weights: Any
    meta: StateMeta
    pages: Tensor
    after: Tensor
    want: Tensor


def cache_of(case: Case, pages: Tensor, types: tuple[torch.dtype, torch.dtype]) -> StatePages:
    parts, tail = case.shape.parts(*types)
    return cut(pages, parts, tail, RING)


@functools.cache
def drawn(name: str, types: tuple[torch.dtype, torch.dtype]) -> Drawn:
    torch.manual_seed(1)
    case = CASES[name]
    parts, tail = case.shape.parts(*types)
    cache, table = drawn_cache(parts, tail, RING, 8 * len(ROWS))
    meta, weights = meta_of(ROWS, table, 2), case.weights(case.shape)
    before = history(ROWS, meta)
    case.exact(torch.randn(int(before.query_start[-1]), case.width).to(types[0]), weights, case.shape, cache, before)
    projected, pages = torch.randn(sum(row.end - row.start for row in ROWS) + 3, case.width).to(types[0]), cache.pages
    found = pages.clone()
    want = case.exact(projected.double(), weights, case.shape, cache, meta)
    return Drawn(projected, weights, meta, found, pages, want)


@pytest.mark.parametrize("types", TYPES, ids=["float32", "bfloat16", "bfloat16 states"])
@pytest.mark.parametrize("name", list(CASES))
def test_ragged_rows_are_those_of_the_recurrence(name, types):
    case, given = CASES[name], drawn(name, types)
    pages = given.pages.clone()
    got = case.host(given.projected, given.weights, case.shape, cache_of(case, pages, types), given.meta)
    limit = 2e-5 if types == (F32, F32) else 1e-2
    assert (got[-3:] == 0).all(), "tokens of no row"
    assert (got.double() - given.want).norm() / given.want.norm() < limit
    mine = cache_of(case, pages, types)
    for run, blocks in enumerate(given.meta.runs[1:], 1):
        is_tail = run % 8 == 2
        for place in mine.tail if is_tail else mine.state:
            count = place.rows * (RING if is_tail else 1)
            a, b = (
                each.read(pages_, blocks, 0, count).double() for each, pages_ in ((place, pages), (place, given.after))
            )
            assert torch.equal(a.isnan(), b.isnan()), (run, place)
            a, b = a.nan_to_num(), b.nan_to_num()
            assert (a - b).norm() <= limit * b.norm(), (run, place)


@pytest.mark.parametrize("name", list(CASES))
def test_no_bit_depends_on_the_other_rows_or_on_threads(name):
    case, types = CASES[name], (BF16, F32)
    given = drawn(name, types)
    found = []
    for threads in (1, 3):
        cpu.set_num_threads(threads)
        pages = given.pages.clone()
        got = case.host(given.projected, given.weights, case.shape, cache_of(case, pages, types), given.meta)
        found.append((got, pages))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    pages, bounds = given.pages.clone(), given.meta.query_start.tolist()
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first < last:
            meta = alone(given.meta, number)
            own = given.projected[first:last].contiguous()
            got = case.host(own, given.weights, case.shape, cache_of(case, pages, types), meta)
            assert torch.equal(got, found[0][0][first:last]), number
    assert torch.equal(pages, found[0][1])


def alone(meta: StateMeta, row: int) -> StateMeta:
    """The step with only one of the rows."""
    names = (
        "base_run", "write_run", "tail_run", "base", "new_base", "start", "checkpoint_run", "checkpoint_at",
    )  # fmt: skip
    own = {name: getattr(meta, name)[row : row + 1] for name in names}
    query_start = meta.query_start[row : row + 2] - meta.query_start[row]
    return StateMeta(meta.runs, query_start=query_start, **own)


@pytest.mark.parametrize("name", ["gates of heads", "gates of channels", "norm behind", "selective"])
def test_no_bit_depends_on_the_cuts_of_a_sequence(name):
    case, generator = CASES[name], torch.Generator().manual_seed(3)
    weights = case.weights(case.shape)
    parts, tail = case.shape.parts(BF16, F32)
    inputs = torch.randn(2 * cpu.PORTION + 19, case.width, generator=generator).to(BF16)

    def call(rows: Tensor, meta: StateMeta, pages: Tensor) -> Tensor:
        return case.host(rows, weights, case.shape, cut(pages, parts, tail, RING), meta)

    def sequence() -> Sequence:
        return Sequence(call, parts, tail, 1, RING)

    want = sequence().prompt(inputs, [len(inputs)])
    assert not want.isnan().any()
    for size in (7, cpu.PORTION - 1):
        assert torch.equal(sequence().prompt(inputs, in_steps(len(inputs), size)), want), size
    few = inputs[:40]
    assert torch.equal(sequence().prompt(few, in_steps(40, 1)), want[:40])
    assert torch.equal(sequence().drafted(few, 1, generator)[:40], want[:40])
