"""InternVL: a picture is cut into up to twelve tiles, as near to its shape as they get, and shown once more as a whole.

Pool (`process`) and loop (`fill`). The tower takes pictures as decoded, since tiles and whole are scaled apart.

    slot of a picture   <img> rows of tile 1, tile 2 ... whole </img>
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from engine.request import Modality
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.pictures import AS_DECODED, Pictures, sides, tower_side
from mm.transform.image import Scale

START, END = "<img>", "</img>"


class InternVL(Pictures):
    """Processor of InternVLForConditionalGeneration."""

    picture_bytes: int = AS_DECODED

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.side = tower_side(config, 448)
        if sides(self.raw.get("size"), self.side) != (self.side, self.side):
            raise ValueError(f"size={self.raw['size']}; the tower reads tiles of {self.side} x {self.side} pixels")
        self.least, self.most = int(self.raw.get("min_patches", 1)), int(self.raw.get("max_patches", 12))
        if self.raw.get("crop_to_patches") is False:
            self.most = 1
        merge = round(1 / float(config.get("downsample_ratio", 0.5)))
        self.tokens = (self.side // self.patch // merge) ** 2

    def choices(self) -> tuple[Any, ...]:
        return self.side, self.least, self.most

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes + (self.most + 1) * self.side**2 * 3 * 14 + (1 << 20)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        most = min(self.most, (options.max_pixels or self.most * self.side**2) // self.side**2)
        columns, rows = canvas(height, width, self.side, self.least, most) if most > 1 else (1, 1)
        return Scale(rows * self.side, columns * self.side, self.patching.resample)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        assert item.scale is not None, "pictures come as decoded"
        whole, side = item.scale.array(item.data), self.side
        rows, columns = item.scale.height // side, item.scale.width // side
        tiles = [
            whole[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) > 1:
            tiles.append(Scale(side, side, self.patching.resample).array(item.data))
        return self.tiles(tiles), len(tiles) * self.tokens

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        start, end = self.encode(START), self.encode(END)
        ids = np.array([*start, *[self.image_id] * part.num_tokens, *end], np.int32)
        return Filling(ids, (((len(start), part.num_tokens),),))


@functools.lru_cache(maxsize=1024)
def canvas(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """(columns, rows) of tiles whose shape is nearest to a picture's; of equals the larger, if the picture fills it."""
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        fills = distance == nearest and width * height > 0.5 * side * side * columns * rows
        if distance < nearest or fills:
            best, nearest = (columns, rows), distance
    return best
