"""A tower that runs in parts between steps: its rows, early readers, failures, and runs dropped in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.request import ROWS, MediaInput
from engine.step.parts.encoder_cache import EncoderCache
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_towers_together import WIDTH, Tower, cache_of, stage, step_of
from tests.engine_kit import quiet, running
from tests.invariance.devices import Device
from tests.invariance.test_media import MIXES, alone, make_request, next_to_a_text

LAYERS = 5


class Layered(Tower):
    """A tower of five layers that each add one; records the layers it ran, and raises for 13s in the third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[float] = []

    def encode_together(self, items: Any) -> list[torch.Tensor]:
        raise AssertionError("runs that began in pieces end so")

    def pieces(self, items: Any) -> Generator[float, None, list[torch.Tensor]]:
        (features,) = items
        x = features["patches"].clone()
        for layer in range(LAYERS):
            number = float(x[0, 0])
            if number == 15 and layer == 2:
                raise ValueError("planted")
            x += 1
            self.layers.append(number)
            yield len(x) / LAYERS
        return [x]


def pieces_of(cache: EncoderCache, work: int, *entries: int) -> bool:
    """Runs a step that has a part of `work` for each of these entries."""
    plan: Any = SimpleNamespace(
        num_encodes=len(entries), encode_slot=[-1] * len(entries), encode_item=[work] * len(entries),
        encode_entry=list(entries),
    )  # fmt: skip
    return cache.advance(plan)


def test_pieces_do_so_much_work_each_and_end_with_the_rows() -> None:
    tower = Layered()
    cache = cache_of(tower)
    stage(cache, (10, 100, "image"))
    layers = []
    for _ in range(3):
        assert pieces_of(cache, 4, 1)
        layers.append(len(tower.layers))
    assert layers == [2, 4, 5], "each layer does 2 of work; the last piece finds the end"
    assert not pieces_of(cache, 4, 1), "nothing is left"
    ((_, _, rows),) = cache.take(step_of(cache, 1))
    assert torch.equal(rows, torch.full((10, WIDTH), 105.0))
    assert cache.begun == {}
    assert cache.seconds_of([1]) == pytest.approx(cache.clock.seconds)


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_rows_that_are_read_early_are_finished_then(pieces: int) -> None:
    tower = Layered()
    cache = cache_of(tower)
    stage(cache, (10, 100, "image"))
    for _ in range(pieces):
        pieces_of(cache, 4, 1)
    ((_, _, rows),) = cache.take(step_of(cache, 1))
    assert (float(rows[0, 0]), len(tower.layers)) == (105.0, LAYERS), "no layer ran twice"


def test_a_tower_that_fails_in_a_piece_ends_the_requests_that_show_it() -> None:
    tower = Tower()
    layered = Layered()
    layered.encode_together = tower.encode_together  # type: ignore[method-assign]
    cache = cache_of(layered)
    stage(cache, (10, 13, "image"), (2, 1, "image"))
    assert pieces_of(cache, 4, 1)
    assert not pieces_of(cache, 4, 1)
    assert cache.begun == {}
    step = step_of(cache, 1, 2)
    assert [float(rows[0, 0]) for _, _, rows in cache.take(step)] == [1]
    assert list(step.home.invalid) == [0]


@pytest.mark.parametrize("how", ["evicted", "forgotten", "another begins"])
def test_a_run_that_is_dropped_begins_anew(how: str) -> None:
    tower = Layered()
    cache = cache_of(tower)
    stage(cache, (10, 100, "image"), (10, 200, "image"))
    pieces_of(cache, 4, 1)
    if how == "evicted":
        cache.evict(1, dead=False)
    elif how == "forgotten":
        cache.drop_rows()
    else:
        pieces_of(cache, 4, 2)
    assert 1 not in cache.begun
    assert len(cache.begun) <= 1, "what runs hold is memory of one item"
    for _ in range(4):
        pieces_of(cache, 4, 1)
    assert float(cache.encoded[1][0, 0]) == 105.0


def test_only_towers_that_can_pause_have_more_work_than_a_step() -> None:
    cache = cache_of(Layered(), Tower())
    patches = {"patches": np.zeros((50, WIDTH), np.float32)}
    image = MediaInput("image", bytes(16), (), 10, patches)
    assert cache.work_of(image, 8) == 50
    assert cache.work_of(MediaInput("audio", bytes(16), (), 10, patches), 8) == 8, "its run cannot be cut"
    assert cache.work_of(MediaInput("image", bytes(16), (), 10, {ROWS: patches["patches"]}), 0) == 10


@pytest.mark.asyncio(loop_scope="session")
async def test_on_the_device_path_rows_decode_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers equal the CPU's."""
    wanted = await asyncio.to_thread(alone, Device("cpu"))
    made: list[HostAccelerator] = []
    monkeypatch.setattr(
        engine.run.start, "open_accelerator", lambda _device: made.append(HostAccelerator()) or made[-1]
    )
    steps: list[tuple[int, int]] = []
    few = {"max_num_seqs": 4, "max_num_queued_reqs": 4, "max_num_batched_tokens": 128, "encoder_cache_tokens": 256}
    mixes = ("video", "two images")
    requests = [await make_request(MIXES[mix]) for mix in mixes]
    async with running(tiny.checkpoint("omni"), encoder_budget=16, **few) as served:
        served.on_step = lambda step: steps.append((step.num_encodes, step.num_rows))
        got = await next_to_a_text(served, requests)
        assert (await quiet(served))["encoder_in_use"] == 0
    assert got == [wanted[mix].tokens for mix in mixes]
    assert sum(encodes for encodes, _ in steps) > 6, "pieces of 16 patches each"
    assert all(rows for encodes, rows in steps if encodes), "the text's row is in each of these steps"
    assert made, "it was the device path"
