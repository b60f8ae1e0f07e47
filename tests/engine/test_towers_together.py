"""New media of a step run through their tower together, up to its budget; a broken item fails alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.base.errors import EngineError
from engine.base.request import ROWS, MediaInput
from engine.step.parts.encoder_cache import EncoderCache
from engine.step.step import Step

WIDTH = 4


class Tower:
    """Makes rows from its patches' numbers; records its runs, and raises for items of 13s."""

    modalities = ("image",)
    row_width = WIDTH
    together = 10

    def __init__(self) -> None:
        self.runs: list[int] = []

    def weight(self, features: Any) -> int:
        return len(features["patches"])

    def encode(self, features: Any) -> torch.Tensor:
        return self.encode_together([features])[0]

    def encode_together(self, items: Any) -> list[torch.Tensor]:
        self.runs.append(len(items))
        if any((features["patches"] == 13).any() for features in items):
            raise ValueError("planted")
        return [features["patches"].clone() for features in items]

    def example(self, modality: Any, rows: int) -> Any: ...
    def picture_bytes(self, rows: int) -> int: ...
    def record(self, record: Any) -> None: ...


class Alone:
    """A tower that takes one item at a time."""

    def __init__(self) -> None:
        self.runs = 0

    def encode(self, features: Any) -> torch.Tensor:
        self.runs += 1
        return features["patches"]


def cache_of(image: Any, audio: Any = None, together: bool = True) -> EncoderCache:
    config = SimpleNamespace(row_parts=1)
    model = SimpleNamespace(towers={"image": image, "audio": audio}, config=config, dtype=torch.float32)
    return EncoderCache(model, together)  # type: ignore[arg-type]


def stage(cache: EncoderCache, *items: tuple[int, float, str]) -> None:
    """Stages (rows, number in them, modality) as entries 1, 2, ..."""
    for entry, (rows, number, modality) in enumerate(items, 1):
        name = ROWS if modality == "rows" else "patches"
        features = {name: np.full((rows, WIDTH), number, np.float32)}
        kind: Any = "image" if modality == "rows" else modality
        cache.stage(entry, bytes([entry]), MediaInput(kind, bytes(16), (), rows, features))


def step_of(cache: EncoderCache, *entries: int) -> Step:
    """A step with one row per entry; each row reads its whole entry."""
    lengths = np.array([cache.inputs[entry].num_tokens for entry in entries], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
    zeros = np.zeros(len(entries), np.int32)
    plan: Any = SimpleNamespace(
        num_media=len(entries), media_start=memoryview(starts), media_length=memoryview(lengths),
        media_row=memoryview(zeros), media_entry=memoryview(np.array(entries, np.int32)),
    )  # fmt: skip
    return SimpleNamespace(plan=plan, rows=SimpleNamespace(starts=starts), home=SimpleNamespace(invalid={}))  # type: ignore[return-value]


def test_a_step_runs_its_new_items_together_up_to_the_budget() -> None:
    tower = Tower()
    cache = cache_of(tower)
    stage(cache, *((rows, rows, "image") for rows in (4, 5, 2, 11, 3, 3)))
    found = cache.take(step_of(cache, 1, 2, 3, 4, 5, 6, 1))
    assert tower.runs == [2, 2, 1, 1], "4 + 5, then 3 + 3; 2 beside 11, which exceeds the budget, run alone"
    assert cache.clock.calls == 4
    assert [float(rows[0, 0]) for _, _, rows in found] == [4, 5, 2, 11, 3, 3, 4]
    assert [rows.shape[0] for _, _, rows in found] == [4, 5, 2, 11, 3, 3, 4]
    cache.take(step_of(cache, 1, 4))
    assert tower.runs == [2, 2, 1, 1], "what has rows runs no more"
    assert cache.seconds_of([1, 2, 3, 4, 5, 6]) == pytest.approx(cache.clock.seconds)
    assert cache.seconds_of([1, 2, 3, 4, 5, 6]) == 0, "told once"


@pytest.mark.parametrize("broken", [1, 3])
def test_a_broken_item_fails_alone(broken: int) -> None:
    cache = cache_of(Tower())
    stage(cache, *((2, 13.0 if entry == broken else entry, "image") for entry in (1, 2, 3)))
    step = step_of(cache, 1, 2, 3)
    found = cache.take(step)
    assert [float(rows[0, 0]) for _, _, rows in found] == [entry for entry in (1, 2, 3) if entry != broken]
    assert list(step.home.invalid) == [broken - 1]
    assert isinstance(step.home.invalid[broken - 1], EngineError)


def test_rows_of_clients_and_towers_of_single_items_run_alone() -> None:
    tower, ears = Tower(), Alone()
    cache = cache_of(tower, ears)
    stage(cache, (2, 1, "image"), (2, 2, "rows"), (2, 3, "audio"), (2, 4, "audio"), (2, 5, "image"))
    found = cache.take(step_of(cache, 1, 2, 3, 4, 5))
    assert [float(rows[0, 0]) for _, _, rows in found] == [1, 2, 3, 4, 5]
    assert (tower.runs, ears.runs) == ([2], 2)


def test_an_exact_server_runs_each_item_alone() -> None:
    tower = Tower()
    cache = cache_of(tower, together=False)
    stage(cache, (2, 1, "image"), (2, 2, "image"))
    cache.take(step_of(cache, 1, 2))
    assert tower.runs == [1, 1]


def test_memory_that_is_short_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = Tower()
    cache = cache_of(tower)
    stage(cache, (2, 1, "image"), (2, 2, "image"))

    def full(items: Any) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(tower, "encode_together", full)
    with pytest.raises(torch.OutOfMemoryError):
        cache.take(step_of(cache, 1, 2))
