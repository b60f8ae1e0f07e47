"""LFM2-VL's pictures. Sizes and words are those that Lfm2VlImageProcessor and Lfm2VlProcessor of transformers 5.24 gave
for the settings below; both need a torchvision of CUDA. Pixels are scaled by torch, as torchvision scales them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mm.item import MediaItem, MediaOptions
from mm.processors.lfm2_vl import Lfm2Pictures
from tests.mm import made

PLAIN, IMAGE, PATCH = MediaOptions(), 9, 16
RELEASED: dict = {}
SMALL = {"tile_size": 128, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 6}
# settings, height, width -> rows and columns of tiles, and the whole picture's rows and columns in units of 32 pixels
SIZES = [
    (RELEASED, 300, 400, (1, 1), (9, 12)),
    (RELEASED, 64, 64, (1, 1), (8, 8)),
    (RELEASED, 1080, 1920, (2, 4), (12, 21)),
    (RELEASED, 1500, 600, (5, 2), (25, 10)),
    (RELEASED, 3000, 2000, (3, 2), (19, 13)),
    (RELEASED, 1024, 1024, (2, 2), (16, 16)),
    ({"do_image_splitting": False}, 1080, 1920, (1, 1), (12, 21)),
    ({"use_thumbnail": False}, 1080, 1920, (2, 4), None),
    ({"min_tiles": 1, "max_tiles": 4}, 2000, 300, (4, 1), (41, 6)),
    (SMALL, 64, 64, (1, 1), (2, 2)),
    (SMALL, 37, 150, (1, 1), (1, 5)),
    (SMALL, 340, 450, (2, 3), (3, 4)),
    (SMALL, 5, 3, (1, 1), (3, 2)),
]


class Words(dict):
    """A tokenizer that gives each text one new token and remembers the texts."""

    def encode(self, text: str) -> list[int]:
        return [self.setdefault(text, 1000 + len(self))]


def processor(folder: Path, settings: dict, words: Words | None = None, **config) -> Lfm2Pictures:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    vision = {"vision_config": {"model_type": "siglip2_vision_model"}, "image_token_id": IMAGE}
    return Lfm2Pictures(folder, {**vision, **config}, encode=(Words() if words is None else words).encode)


def processed(ours: Lfm2Pictures, pixels: np.ndarray, options: MediaOptions = PLAIN):
    scale = ours.plan_image(*pixels.shape[:2], options)
    return ours.process(MediaItem("image", pixels, scale=scale), bytes(16), options)


def scaled(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 pixels, scaled with the torch call that torchvision uses."""
    planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    done = torch.nn.functional.interpolate(planes, (height, width), mode="bilinear", antialias=True)
    return done[0].permute(1, 2, 0).numpy()


def patches(pixels: np.ndarray) -> np.ndarray:
    """Float32 [patches, PATCH * PATCH * 3], from -1 to 1; the colours of a pixel are adjacent."""
    height, width = (side // PATCH for side in pixels.shape[:2])
    cut = pixels.reshape(height, PATCH, width, PATCH, 3).swapaxes(1, 2).reshape(height * width, -1)
    return cut.astype(np.float32) / 127.5 - 1


@pytest.mark.parametrize(("settings", "height", "width", "tiles", "whole"), SIZES)
def test_a_picture_is_cut_and_written_as_the_reference_does(tmp_path, settings, height, width, tiles, whole):
    words, (rows, columns) = Words(), tiles
    ours, pixels = processor(tmp_path, settings, words), made.noise(height, width)
    item = processed(ours, pixels)
    side, want, text = ours.tile, [], ["<|image_start|>"]
    if rows * columns > 1:
        large = scaled(pixels, rows * side, columns * side)
        for row in range(rows):
            for column in range(columns):
                want.append(patches(large[row * side : (row + 1) * side, column * side : (column + 1) * side]))
                text += [f"<|img_row_{row + 1}_col_{column + 1}|>", *["row"] * (side // 32) ** 2]
        text += ["<|img_thumbnail|>"] * (whole is not None)
    if whole is not None:
        want.append(patches(scaled(pixels, 32 * whole[0], 32 * whole[1])))
        text += ["row"] * (whole[0] * whole[1])
    got = np.concatenate([part.features["pixel_values"] for part in item.parts])
    assert np.abs(got - np.concatenate(want)).max() <= 1.001 / 127.5
    filling = ours.fill(item)
    names = {number: name for name, number in words.items()}
    assert [names.get(token, "row") for token in filling.token_ids.tolist()] == [*text, "<|image_end|>"]
    for part, runs in zip(item.parts, filling.runs, strict=True):
        assert sum(length for _, length in runs) == part.num_tokens
        assert all((filling.token_ids[start : start + length] == IMAGE).all() for start, length in runs)
    assert len({part.hash for part in item.parts}) == len(item.parts)


@pytest.mark.parametrize(("height", "width"), [(20, 9000), (1, 60_000), (9000, 20)])
def test_a_line_of_pixels_has_no_more_rows_than_a_picture(tmp_path, height, width):
    ours = processor(tmp_path, RELEASED)
    rows, columns = ours.whole(height, width, 256)
    assert 1 <= rows * columns <= 256


def test_fewer_pixels_are_fewer_tiles_and_rows(tmp_path):
    ours, pixels = processor(tmp_path, RELEASED), made.noise(1080, 1920)
    counts = [
        sum(part.num_tokens for part in processed(ours, pixels, MediaOptions(max_pixels=most)).parts)
        for most in (None, 1_200_000, 500_000, 60_000)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] <= 60_000 // 32**2


def test_without_words_there_are_rows_alone(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"use_image_special_tokens": false}')
    ours = processor(tmp_path, RELEASED)
    item = processed(ours, made.noise(1080, 1920))
    assert set(ours.fill(item).token_ids.tolist()) == {IMAGE}


def test_tiles_of_broken_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tile_size=500 is no multiple of the 32 pixels that become one row"):
        processor(tmp_path, {"tile_size": 500})
