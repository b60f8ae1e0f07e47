"""LLaVA-NeXT and OneVision: a picture becomes a scaled view of the whole, and tiles at the best of some resolutions.

Pool (`process`) and loop (`fill`). The picture is scaled into the resolution that preserves most of its pixels, and
padded there. Rows of the tiles that hold only padding are dropped, and a newline follows each remaining line. OneVision
(mm/processors/onevision) interpolates to fewer rows if they are too many. The encoder gathers its rows in this order:
`places` holds the source rows of each token, `shares` their weights.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions
from mm.processors.base import Encode, no_texts
from mm.processors.pictures import AS_DECODED, Pictures, sides, tower_side
from mm.transform.image import Scale

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
LARGEST = 1 << 31  # pixels: more than any resolution has
Size = tuple[int, int]  # height, width


class AnyRes(Pictures):
    """Processor of LlavaNextForConditionalGeneration."""

    writes_texts: ClassVar[bool] = False
    picture_bytes: int = AS_DECODED

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.side = tower_side(config, 336)
        for key in ("size", "crop_size"):
            if self.raw.get(key) and sides(self.raw[key], self.side) != (self.side, self.side):
                raise ValueError(f"{key}={self.raw[key]}; the tower reads tiles of {self.side} x {self.side} pixels")
        given = config.get("image_grid_pinpoints") or self.raw.get("image_grid_pinpoints") or PINPOINTS
        self.pinpoints = tuple((int(height), int(width)) for height, width in given)
        if any(edge % self.side for point in self.pinpoints for edge in point):
            raise ValueError(f"image_grid_pinpoints must be multiples of the tower's {self.side} pixels")
        self.most = 0  # most rows, in units of one tile's rows; 0: no bound
        self.grid = self.side // self.patch

    def choices(self) -> tuple[Any, ...]:
        return self.side, self.pinpoints, self.most

    def cost(self, modality: Modality, item_bytes: int) -> int:
        pixels = max(height * width for height, width in self.pinpoints) + self.side**2
        return item_bytes + pixels * 3 * 14 + (1 << 20)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        target = best_resolution((height, width), self.allowed(options))
        by_width, by_height = target[1] / width, target[0] / height
        if by_width < by_height:
            return Scale(min(math.ceil(height * by_width), target[0]), target[1], self.patching.resample)
        return Scale(target[0], min(math.ceil(width * by_height), target[1]), self.patching.resample)

    def allowed(self, options: MediaOptions) -> tuple[Size, ...]:
        """The resolutions within the request's bound, or the smallest one if none is."""
        most = options.max_pixels or LARGEST
        within = tuple(point for point in self.pinpoints if point[0] * point[1] <= most)
        return within or (min(self.pinpoints, key=lambda point: point[0] * point[1]),)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        assert item.scale is not None, "pictures come as decoded"
        size, side = item.data.shape[:2], self.side
        target = best_resolution(size, self.allowed(options))
        canvas = np.zeros((*target, 3), np.uint8)
        top, left = (target[0] - item.scale.height) // 2, (target[1] - item.scale.width) // 2
        canvas[top : top + item.scale.height, left : left + item.scale.width] = item.scale.array(item.data)
        tiles = [Scale(side, side, self.patching.resample).array(item.data)]
        for row in range(0, target[0], side):
            tiles += [canvas[row : row + side, column : column + side] for column in range(0, target[1], side)]
        places, shares = arranged(size, target[0] // side, target[1] // side, self.grid, self.most)
        return {**self.tiles(tiles), "places": places, "shares": shares}, len(places)


@functools.lru_cache(maxsize=1024)
def best_resolution(size: Size, pinpoints: tuple[Size, ...]) -> Size:
    """The resolution that preserves most of a picture's pixels; among equals, the smallest."""

    def fitted(point: Size) -> tuple[int, int]:
        scale = min(point[1] / size[1], point[0] / size[0])
        visible = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return visible, visible - point[0] * point[1]

    return max(pinpoints, key=fitted)


@functools.lru_cache(maxsize=256)
def arranged(size: Size, rows: int, columns: int, grid: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Places int64 [tokens, taps]: indices of the tiles' rows, the newline has the last index. Shares float32 [tokens,
    taps].
    """
    height, width = rows * grid, columns * grid
    top, left = _padding(size, (height, width))
    line, column = np.arange(top, height - top), np.arange(left, width - left)
    taps = [(line, np.ones(len(line), np.float32))], [(column, np.ones(len(column), np.float32))]
    ratio = math.sqrt(len(line) * len(column) / (most * grid**2)) if most else 0.0
    if ratio > 1.1:
        taps = shrunk(line, int(len(line) // ratio)), shrunk(column, int(len(column) // ratio))
    whole, newline = np.arange(grid**2), (1 + rows * columns) * grid**2
    places: list[np.ndarray] = []
    shares: list[np.ndarray] = []
    for lines, down in taps[0]:
        for across, right in taps[1]:
            tile = 1 + (lines // grid)[:, None] * columns + across // grid
            place = tile * grid**2 + (lines % grid)[:, None] * grid + across % grid
            once = np.float32(not places)  # weight of the whole view and the newlines: 1 in the first tap only
            ended = np.pad(place, ((0, 0), (0, 1)), constant_values=newline)
            share = np.pad(down[:, None] * right, ((0, 0), (0, 1)), constant_values=once)
            places.append(np.concatenate([whole, ended.reshape(-1)]))
            shares.append(np.concatenate([np.full(len(whole), once), share.reshape(-1)]))
    out = np.stack(places, axis=1).astype(np.int64), np.stack(shares, axis=1).astype(np.float32)
    for array in out:
        array.flags.writeable = False
    return out


def _padding(size: Size, fitted: Size) -> Size:
    """Number of padding lines at the top and of padding columns at the left; bottom and right have as many."""
    if size[1] / size[0] > fitted[1] / fitted[0]:
        return (fitted[0] - int(round(size[0] * (fitted[1] / size[1]), 7))) // 2, 0
    return 0, (fitted[1] - int(round(size[1] * (fitted[0] / size[0]), 7))) // 2


def shrunk(places: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Linear interpolation along an axis: two neighbours of each new place, and their weights."""
    at = np.maximum((np.arange(count, dtype=np.float32) + 0.5) * np.float32(len(places) / count) - 0.5, 0)
    low = at.astype(np.int64)
    high = np.minimum(low + 1, len(places) - 1)
    share = (at - low).astype(np.float32)
    return [(places[low], 1 - share), (places[high], share)]
