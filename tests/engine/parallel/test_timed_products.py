"""The start of several ranks times each product once, and all ranks multiply so. Mutant: a rank that times by itself.

The library's algorithms are names; each rank's clock prefers another one, and each has other bits.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
import torch

import engine.run.start
from engine.kernels.gemm import algorithms
from engine.kernels.gemm.cublaslt import ALGORITHM_BYTES, RefusedError
from engine.kernels.gemm.timed import TimedProducts
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.test_running import PROMPTS
from tests.engine_kit import answer, running, text_request

NAMES = [bytes([65 + rank]) * ALGORITHM_BYTES for rank in range(8)]
LONG = [*range(5, 95), *PROMPTS[0][:20]]


def rank_here() -> int:
    """The rank whose thread calls."""
    name = threading.current_thread().name
    return int(name.rpartition("-")[2]) if name.startswith("omniloop-rank") else 0


class Library:
    """One rank's library: algorithm n adds n to the products' last bits."""

    version = 1

    def __init__(self, made: Timed) -> None:
        self._made = made

    def algorithms(self, shape):
        self._made.asked[shape].add(rank_here())
        return NAMES

    def product(self, shape, algorithm):
        def launch(x, weight, added, out):
            assert len(x) == shape.rows
            self._made.seen[shape].add(algorithm)
            y = x.float() @ weight.float().t() * (1 + 1e-3 * NAMES.index(algorithm))
            out.copy_(y if added is None else added + y)

        launch.algorithm = algorithm
        return launch


class Timed:
    """What was timed and launched."""

    def __init__(self) -> None:
        self.seen: dict[object, set[bytes]] = defaultdict(set)  # the algorithms of a shape's launches
        self.asked: dict[object, set[int]] = defaultdict(set)  # the ranks that timed a shape

    def disagreed(self) -> set[object]:
        return {shape for shape, found in self.seen.items() if len(found) > 1}


@pytest.fixture
def timed(monkeypatch, tmp_path) -> Timed:
    made = Timed()

    def open_accelerator(_device):
        opened = HostAccelerator()
        opened.device = torch.device("cpu:0")  # weights have a device's form
        return opened

    def clock(runs, weights, times):
        timed = [getattr(run, "args", (None,))[0] for run in runs]
        return [1.0 if getattr(each, "algorithm", b"") == NAMES[rank_here()] else 2.0 for each in timed]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(engine.run.start, "open_accelerator", open_accelerator)
    small = {"TYPES": {torch.float32: 0}, "LEAST_WEIGHT": 0, "LEAST_ROWS": 1, "COLD": 1}
    for name, value in {**small, "seconds": clock}.items():
        monkeypatch.setattr(algorithms, name, value)
    monkeypatch.setattr(algorithms, "open_library", lambda: Library(made))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    return made


async def tokens(name: str, ranks: int, made: Timed) -> list[int]:
    settings = {"tensor_parallel": ranks, "max_num_batched_tokens": 96}
    async with running(tiny.checkpoint(name), **settings) as it:
        made.seen.clear()  # the launches that were timed
        (found,) = await answer(it, text_request(LONG, 6, ignore_eos=True))
    return found


@pytest.mark.parametrize(("name", "ranks", "timing"), [("gemma", 2, {0}), ("gemma", 3, {0, 1})])
async def test_all_ranks_multiply_a_shape_alike(timed, name, ranks, timing):
    """The first of Gemma's three ranks has a wider MLP than the others."""
    await tokens(name, ranks, timed)
    assert set().union(*timed.seen.values()) == {NAMES[rank] for rank in timing}
    assert not timed.disagreed()
    assert all(len(ranks) == 1 for ranks in timed.asked.values())


async def test_a_rank_that_times_by_itself_is_found(timed, monkeypatch):
    monkeypatch.setattr(TimedProducts, "of_next_rank", lambda self: TimedProducts())
    monkeypatch.setattr(algorithms.Saved, "of", lambda self, kind: {})  # the first rank has written its choices
    await tokens("qwen2", 2, timed)
    assert timed.disagreed()


async def test_choices_of_an_earlier_start_hold_for_all_ranks(timed):
    first = await tokens("qwen2", 2, timed)
    timed.asked.clear()
    assert await tokens("qwen2", 2, timed) == first
    assert not timed.asked
    assert timed.seen


def test_a_library_that_only_one_rank_can_open_ends_the_start(timed, monkeypatch):
    def refuse():
        raise RefusedError("cublasLtCreate returned 1")

    first, weight = TimedProducts(), torch.zeros(64, 64, dtype=torch.float32)
    other = first.of_next_rank()
    for each in (first, other):
        with each.algorithms.recording():
            each.algorithms.record(weight, added=False, gated=False)
    first.autotune([96], torch.float32, lambda kind, rows: True)
    monkeypatch.setattr(algorithms, "open_library", refuse)
    with pytest.raises(RefusedError, match="cublasLtCreate returned 1"):
        other.autotune([96], torch.float32, lambda kind, rows: True)


def test_products_that_a_rank_could_not_time_are_timed_by_no_other(timed, monkeypatch, caplog):
    def no_room(*_given):
        raise torch.OutOfMemoryError("none is left")

    first, weight = TimedProducts(), torch.zeros(64, 64, dtype=torch.float32)
    other = first.of_next_rank()
    for each in (first, other):
        with each.algorithms.recording():
            each.algorithms.record(weight, added=False, gated=False)
    monkeypatch.setattr(algorithms, "_time", no_room)
    first.autotune([96], torch.float32, lambda kind, rows: True)
    assert "torch chooses its algorithms" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(algorithms, "open_library", lambda: Library(timed))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    other.autotune([96], torch.float32, lambda kind, rows: True)
    assert not timed.asked
    x = weight.new_zeros(96, 64)
    assert not other.algorithms.run_chosen(x, weight, False, None, x.clone())
