"""Items of several requests that share a run of their tower have, bit for bit, the rows that each has alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.encoders.tower import PausingTower, SharedTower, bounds_of
from tests import tiny
from tests.models.seeing import PLAIN, items, load, processor
from tests.models.test_sounds import FAMILY, SAMPLES, processed
from tests.tiny_hearing import qwen2_audio, whisper

SEEING = (
    "llava", "llava-siglip", "llava-pixtral", "mistral3", "internvl", "internvl-6b", "gemma3-vision", "paligemma",
    "idefics3", "llava_next", "llava_onevision", "glm4v", "gemma4-vision", "gemma4-small-vision", "llama4-vision",
    "qwen2_vl", "qwen3_vl", "hunyuan_vl", "lfm2_vl",
)  # fmt: skip

HEARING = (
    "voxtral",
    "glm-asr",
    "audio-flamingo",
    "qwen3-asr",
    "ultravox",
    "fun-audio",
    "gemma4-audio",
    "granite-speech",
    "phi4mm",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's convolutions (Granite Speech) divide sums among threads, so other threads give other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_pieces(tower: SharedTower, given: list[dict[str, torch.Tensor]], alone: list[torch.Tensor]) -> None:
    """Interleaves runs that pause after each layer: no run overwrites another run's tensors."""
    assert isinstance(tower, PausingTower)
    runs = [tower.pieces([features]) for features in given]
    works, left, found = [0.0] * len(runs), set(range(len(runs))), {}
    while left:
        for number in sorted(left):
            try:
                works[number] += next(runs[number])
            except StopIteration as end:
                left.remove(number)
                found[number] = end.value[0]
    assert all(torch.equal(found[number], rows) for number, rows in enumerate(alone))
    weights = [tower.weight(features) for features in given]
    assert all(0 < work <= 1.5 * weight for work, weight in zip(works, weights)), (works, weights)


def together(tower: SharedTower, given: list[dict[str, torch.Tensor]]) -> None:
    with torch.inference_mode():
        alone = [tower.encode(features) for features in given]
        found = tower.encode_together(given)
        in_pieces(tower, given, alone)
    assert len(found) == len(alone)
    for rows, want in zip(found, alone):
        assert torch.equal(rows, want)
        assert rows.untyped_storage().nbytes() == rows.nbytes, "rows that hold others' memory are never freed"


@pytest.mark.parametrize("name", SEEING)
def test_pictures_have_the_rows_of_each_alone(name: str) -> None:
    tower = load(tiny.checkpoint(name)).towers["image"]
    given = []
    for prompt in ("large picture", "two pictures"):
        for item in items(name, prompt):
            for part in processor(name).process(item, bytes(16), PLAIN).parts:
                given.append({key: torch.tensor(array) for key, array in part.features.items()})
    assert len(given) > 2
    assert all(tower.weight(features) == len(features["pixel_values"]) for features in given)
    together(tower, given)


@pytest.mark.parametrize("name", HEARING)
def test_sounds_have_the_rows_of_each_alone(name: str) -> None:
    """Sounds of a part of a window, of one window, and of several."""
    family = FAMILY[name]
    tower = load(family.folder).towers["audio"]
    parts = [processed(family, count).parts[0] for count in SAMPLES]
    together(tower, [{key: torch.tensor(array) for key, array in part.features.items()} for part in parts])


@pytest.mark.parametrize("folder", [whisper, qwen2_audio], ids=lambda folder: folder.__name__)
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_windows_run_as_many_at_once_as_there_is_room_for(folder: Any, at_once: int, monkeypatch: Any) -> None:
    tower = load(folder()).towers["audio"]
    bins, positions = tower.config.num_mel_bins, tower.config.num_positions
    draw = torch.Generator().manual_seed(1)
    mels = [torch.randn(bins, 2 * positions, generator=draw) for _ in range(5)]
    monkeypatch.setattr(tower, "together", at_once * positions)
    runs, heard = [], tower._encoded

    def counted(windows: Any) -> torch.Tensor:
        runs.append(len(windows))
        return heard(windows)

    monkeypatch.setattr(tower, "_encoded", counted)
    given = [{"input_features": mel, "num_frames": torch.tensor(3 + 7 * i)} for i, mel in enumerate(mels)]
    assert [tower.weight(features) for features in given] == [positions] * 5
    together(tower, given)
    assert runs == [1] * 5 + {1: [1] * 5, 2: [2, 2, 1], 5: [5]}[at_once] + [1] * 5


@pytest.mark.parametrize("lengths", [(4,), (4, 4, 4), (4, 6), (6, 4, 4), (1, 2, 2, 1, 1)])
def test_bounds_are_the_running_sum_of_lengths(lengths: tuple[int, ...]) -> None:
    found = bounds_of(lengths, torch.device("cpu"))
    assert found.dtype == torch.int32
    assert found.tolist() == [sum(lengths[:count]) for count in range(len(lengths) + 1)]
