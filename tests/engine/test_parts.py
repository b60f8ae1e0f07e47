"""Hooks of StepPart that few current parts use: gates, layer hooks, graph variants, claimed layers of the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from _fast.steady import SPECIAL_VARIANT_SHIFT
from engine import Request
from engine.base.request import FinishReason
from engine.cache.spec import LayerCache
from engine.cache.tokens import FullSpec
from engine.layers.batch import Batch, DraftedRows, LayerHook
from engine.layers.stream import Stream
from engine.run import start
from engine.step.live import LiveRow
from engine.step.parts import order
from engine.step.parts.part import ABSENT, JOINS, WAITS, Claim, StepPart, Steps
from engine.step.step import Chosen, Step
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running, text_request


@pytest.fixture(params=["host", "device"])
def backend(request, monkeypatch) -> str:
    """Both backends; the device's has graphs that are plain calls."""
    if request.param == "device":
        monkeypatch.setattr(start, "open_accelerator", lambda _device: HostAccelerator())
    return request.param


def with_part(monkeypatch: pytest.MonkeyPatch, part: StepPart) -> None:
    monkeypatch.setattr(order, "PARTS", [*order.PARTS, lambda setting: part])


class Gate(StepPart):
    """A gate that is closed until the test opens it."""

    name = "gate"

    def __init__(self) -> None:
        self.is_open = False
        self.asked = 0
        self.wake: Any

    def start(self, steps: Steps) -> None:
        self.wake = steps.wake

    def gate(self, request: Request) -> bool:
        self.asked += 1
        return self.is_open


async def test_a_request_waits_at_a_closed_gate_and_enters_when_the_part_wakes_the_thread(backend, monkeypatch):
    part = Gate()
    with_part(monkeypatch, part)
    async with running(tiny.checkpoint("llama")) as engine:
        pending = asyncio.ensure_future(answer(engine, text_request([3, 4, 5], 4, n=2, temperature=1.0, seed=3)))
        leaving = engine.submit(text_request([6, 7], 4))
        while part.asked < 2:  # noqa: ASYNC110 (both have arrived)
            await asyncio.sleep(0)
        held = await engine.on_device(lambda runtime: runtime.admission.ledger())
        assert (held["backlog"], held["live_rows"]) == (3, 0)
        leaving.abort()
        part.is_open = True
        part.wake()
        tokens = await pending
        assert [len(choice) for choice in tokens] == [4, 4]
        assert tokens[0] != tokens[1], "each choice draws with a seed of its own"


class Recorder(StepPart):
    """Records the residual stream after every layer, and the input of the choice; claims a layer of the cache."""

    name = "recorder"
    passes, whole = 0, True

    def __init__(self) -> None:
        self.layers: list[tuple[int, torch.Tensor]] = []
        self.chosen: list[tuple[int, torch.Tensor]] = []
        self.caches: Sequence[LayerCache] = ()
        self.blocks = 0
        self.marked: set[int] = set()

    def claim(self) -> Claim:
        return Claim(specs=(FullSpec(2, 8, torch.float32),), variants=1)

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        self.blocks, self.caches = num_blocks, caches

    def layer_hook(self) -> LayerHook:
        return self

    def draft(self, batch: Batch, rows: DraftedRows, first: bool) -> None:
        raise AssertionError("there are no passes")

    def begin(self, batch: Batch, rows: DraftedRows | None) -> None:
        assert batch.whole

    def after_layer(self, number: int, x: Stream) -> None:
        self.layers.append((number, x.rows().clone()))

    def after_choice(self, chosen: Chosen, variant: int) -> None:
        if variant:
            self.chosen.append((variant, chosen.hidden.clone()))

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        if row.request.sampling.max_tokens == 5:
            self.marked.add(slot)
        return slot in self.marked

    def reset(self, slot: int, poison: bool) -> None:
        self.marked.discard(slot)

    def special(self, slot: int) -> int:
        return self.variant << SPECIAL_VARIANT_SHIFT

    def role(self, step: Step) -> int:
        return JOINS if self.marked & set(step.rows.slots.tolist()) else ABSENT


async def test_hooks_inside_a_forward_and_behind_a_choice_run_on_both_backends(backend, monkeypatch):
    async with running(tiny.checkpoint("llama")) as engine:
        wanted = await answer(engine, text_request([3, 4, 5, 6], 5))
    part = Recorder()
    with_part(monkeypatch, part)
    async with running(tiny.checkpoint("llama")) as engine:
        runtime = engine.inspect().runtime
        assert len(part.caches) == 1
        keys = part.caches[0][0]
        assert keys.shape[0] == part.blocks == runtime.limits.num_blocks + 1
        part.layers.clear()
        part.chosen.clear()
        assert await answer(engine, text_request([3, 4, 5, 6], 4)) == [wanted[0][:4]], "a request without the part"
        assert not part.chosen
        part.layers.clear()
        assert await answer(engine, text_request([3, 4, 5, 6], 5)) == wanted
        count = len(runtime.model.layers)
        assert [number for number, _ in part.layers[:count]] == list(range(count))
        assert len(part.layers) % count == 0
        assert {variant for variant, _ in part.chosen} == {part.variant}
        assert len(part.chosen) >= 5
        hidden = part.layers[count - 1][1]
        assert hidden.shape[1] == runtime.model_config.text.hidden_size
        assert bool(torch.isfinite(hidden[:4]).all())


class Raising(StepPart):
    """Raises in the method that the test names."""

    name = "raising"

    def __init__(self, where: str) -> None:
        self.where = where
        self.slots: set[int] = set()

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        if row.request.sampling.max_tokens == 5:
            self.slots.add(slot)
        return slot in self.slots

    def reset(self, slot: int, poison: bool) -> None:
        self.slots.discard(slot)

    def role(self, step: Step) -> int:
        return WAITS if self.slots & set(step.rows.slots.tolist()) else ABSENT

    def before(self, step: Step) -> None:
        self._fail("before")

    def between(self, step: Step) -> None:
        self._fail("between")

    def _fail(self, where: str) -> None:
        if self.where == where:
            raise ValueError("planted")


@pytest.mark.parametrize("where", ["before", "between"])
async def test_a_part_that_raises_ends_the_rows_of_its_step(backend, monkeypatch, where):
    with_part(monkeypatch, Raising(where))
    async with running(tiny.checkpoint("llama")) as engine:
        deltas = [delta async for delta in engine.submit(text_request([3, 4, 5], 5))]
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert len((await answer(engine, text_request([3, 4, 5], 4)))[0]) == 4
