"""Idefics3 and SmolVLM: a picture becomes tiles, each labelled with its row and column, and a view of the whole.

Pool (`process`) and loop (`fill`). A picture is scaled three times, as in training: its longer side to the length in
the processor's files, then both sides to multiples of a tile, then this picture to a single tile.

    slot of a picture of 2 tiles   F <row_1_col_1> I..I F <row_1_col_2> I..I \\n\\n F <global-img> I..I F
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.pictures import Pictures, sides, tower_side
from mm.transform.image import Scale

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
LANCZOS = 1  # Pillow's number
LARGEST = 4096  # pixels along a side


class Idefics3(Pictures):
    """Processor of Idefics3ForConditionalGeneration and SmolVLMForConditionalGeneration."""

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, functools.lru_cache(maxsize=1024)(encode))
        raw, self.side = self.raw, tower_side(config, 364)
        tile = sides(raw.get("max_image_size"), self.side)
        if tile != (self.side, self.side):
            raise ValueError(
                f"max_image_size={raw['max_image_size']}; the tower reads {self.side} x {self.side} pixels"
            )
        self.longest = sides(raw.get("size"), 4 * self.side)[0]
        self.cuts = bool(raw.get("do_image_splitting", True))
        self.filter = int(raw.get("resample", LANCZOS))
        self.tokens = (self.side // self.patch // int(config.get("scale_factor", 2))) ** 2

    def choices(self) -> tuple[Any, ...]:
        return self.side, self.longest, self.cuts, self.filter

    def cost(self, modality: Modality, item_bytes: int) -> int:
        # Rounding both sides up to tiles may double a small picture; float32 patches take four times its bytes.
        return 2 * (item_bytes + 3 * self.side * (self.longest + self.side)) * 12 + (1 << 20)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """Scale the longer side to `longest`, but at most LARGEST."""
        shape, longest = width / height, self.longest
        if options.max_pixels:
            longest = min(longest, max(self.side, math.isqrt(options.max_pixels)))
        if width >= height:
            height, width = int(longest / shape), longest
            height += height % 2
        else:
            height, width = longest, int(longest * shape)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        shape = width / height
        if width >= height and width > LARGEST:
            height, width = int(LARGEST / shape), LARGEST
        elif height > width and height > LARGEST:
            height, width = LARGEST, int(LARGEST * shape)
        return Scale(max(height, 1), max(width, 1), self.filter)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        side, single = self.side, Scale(self.side, self.side, self.filter)
        if not self.cuts:
            features = self.tiles([single.array(item.data)])
            return {**features, "tiles": np.zeros(2, np.int64)}, self.tokens
        rows, columns = tiles_of(item.data.shape[0], item.data.shape[1], side)
        whole = Scale(rows * side, columns * side, self.filter).array(item.data)
        pieces = [
            whole[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(pieces) == 1:
            rows = columns = 0
        else:
            pieces.append(single.array(whole))
        return {**self.tiles(pieces), "tiles": np.array([rows, columns], np.int64)}, len(pieces) * self.tokens

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        rows, columns = part.features["tiles"].tolist()
        ids: list[int] = []
        runs = []
        for number in range(rows * columns + 1):
            row, column = divmod(number, columns) if columns else (0, 0)
            if number and not column:
                ids += self.encode("\n" if row < rows else "\n\n")  # after the last row, the whole view follows
            name = f"<row_{row + 1}_col_{column + 1}>" if row < rows else WHOLE
            ids += [*self.encode(AROUND), *self.encode(name)]
            runs.append((len(ids), self.tokens))
            ids += [self.image_id] * self.tokens
        ids += self.encode(AROUND)
        return Filling(np.array(ids, np.int32), (tuple(runs),))


def tiles_of(height: int, width: int, side: int) -> tuple[int, int]:
    """(rows, columns) of the tiles that a scaled picture fills: first along its longer side, then along the other by
    its shape.
    """
    shape = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return math.ceil(int(columns * side / shape) / side), columns
    rows = math.ceil(height / side)
    return rows, math.ceil(int(rows * side * shape) / side)
