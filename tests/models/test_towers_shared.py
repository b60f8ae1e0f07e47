"""Items of several requests that share a run of their tower have the rows of each alone, bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine.encoders.tower import SharedTower, bounds_of
from tests import tiny
from tests.models.seeing import PLAIN, items, load, processor

SEEING = (
    "llava", "llava-siglip", "llava-pixtral", "mistral3", "internvl", "internvl-6b", "gemma3-vision", "paligemma",
    "idefics3", "llava_next", "llava_onevision", "glm4v", "gemma4-vision", "gemma4-small-vision",
)  # fmt: skip


def together(tower: SharedTower, given: list[dict[str, torch.Tensor]]) -> None:
    with torch.inference_mode():
        alone = [tower.encode(features) for features in given]
        found = tower.encode_together(given)
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


@pytest.mark.parametrize("lengths", [(4,), (4, 4, 4), (4, 6), (6, 4, 4), (1, 2, 2, 1, 1)])
def test_bounds_are_the_running_sum_of_lengths(lengths: tuple[int, ...]) -> None:
    found = bounds_of(lengths, torch.device("cpu"))
    assert found.dtype == torch.int32
    assert found.tolist() == [sum(lengths[:count]) for count in range(len(lengths) + 1)]
