"""Llama 4: a picture becomes a canvas of up to sixteen square tiles, and a view of the whole.

Pool (`process`) and loop (`fill`). Pictures come unscaled, because tiles and the whole view are scaled separately. The
canvas is the one that enlarges a picture least; if all are smaller than the picture, the one that shrinks it least;
among equals the smallest, as in transformers' get_best_fit. The rest of the canvas is black.

    slot of 2 x 2 tiles   start  I..I x I..I y  I..I x I..I y  image I..I end
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.pictures import AS_DECODED, Pictures, picture_settings, sides
from mm.processors.qwen_vl import token_id
from mm.transform.image import BILINEAR, Scale

AS_RELEASED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": BILINEAR}
WORDS = {  # keys of processor_config.json, and their defaults
    "start_of_image_token": "<|image_start|>",
    "tile_x_separator_token": "<|tile_x_separator|>",
    "tile_y_separator_token": "<|tile_y_separator|>",
    "fake_image_token": "<|image|>",
    "end_of_image_token": "<|image_end|>",
}


class Llama4(Pictures):
    """Processor of Llama4ForConditionalGeneration."""

    picture_bytes: int = AS_DECODED

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.raw = {**AS_RELEASED, **self.raw}
        self.patching = picture_settings(self.raw, self.patching)
        vision = config["vision_config"]
        self.side = int(vision.get("image_size", 448))
        if sides(self.raw.get("size"), self.side) != (self.side, self.side):
            raise ValueError(f"size={self.raw['size']}; the tower reads tiles of {self.side} x {self.side} pixels")
        if self.raw.get("resize_to_max_canvas"):
            raise ValueError("resize_to_max_canvas=true is not supported: set it to false")
        self.most = int(self.raw.get("max_patches") or 16)
        merge = round(1 / float(vision.get("pixel_shuffle_ratio", 0.5)))
        self.tokens = (self.side // self.patch // merge) ** 2  # rows per tile
        self.image_id = token_id(config, "image", 200_092)
        named = Path(folder) / "processor_config.json"
        said = json.loads(named.read_text(encoding="utf-8")) if named.is_file() else {}
        self.words = {key: str(said.get(key) or word) for key, word in WORDS.items()}
        self.mark = 200_090  # the released id, for servers without a tokenizer
        with contextlib.suppress(MediaError):
            self.mark = self.one(self.words["fake_image_token"])
        self.media_token_ids = frozenset((self.mark, self.image_id))

    def placeholder(self, modality: Any) -> int:
        return self.mark

    def choices(self) -> tuple[Any, ...]:
        return self.side, self.most

    def cost(self, modality: Any, item_bytes: int) -> int:
        return item_bytes + (self.most + 1) * self.side**2 * 3 * 14 + (1 << 20)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        most = max(1, min(self.most, (options.max_pixels or self.most * self.side**2) // self.side**2))
        rows, columns = canvas(height, width, self.side, most)
        return Scale(rows * self.side, columns * self.side, self.patching.resample)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        assert item.scale is not None, "pictures come as decoded"
        high, wide, side = item.scale.height, item.scale.width, self.side
        height, width = item.data.shape[:2]
        new = fitted(height, width, min(max(height, side), high), min(max(width, side), wide))
        filled = np.zeros((high, wide, 3), np.uint8)
        filled[: new[0], : new[1]] = Scale(*new, self.patching.resample).array(item.data)
        rows, columns = high // side, wide // side
        tiles = [
            filled[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) > 1:
            tiles.append(Scale(side, side, self.patching.resample).array(item.data))
        made = {**self.tiles(tiles), "tiles": np.array([rows, columns], np.int64)}
        return made, len(tiles) * self.tokens

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        rows, columns = part.features["tiles"].tolist()
        start, separator, below, whole, end = (self.one(word) for word in self.words.values())
        ids, runs = [start], []

        def tile() -> None:
            runs.append((len(ids), self.tokens))
            ids.extend([self.image_id] * self.tokens)

        if rows * columns > 1:
            for _ in range(rows):
                for column in range(columns):
                    tile()
                    ids.append(separator if column < columns - 1 else below)
        ids.append(whole)
        tile()
        return Filling(np.array([*ids, end], np.int32), (tuple(runs),))


def canvas(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of tiles; compares numbers in float32, as the reference does."""
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if not count % rows:
                by_shape.setdefault(rows / (count // rows), []).append((rows, count // rows))
    grids = np.array([grid for shapes in by_shape.values() for grid in shapes])
    scales = ((grids * side).astype(np.float32) / np.array([height, width], np.float32)).min(1)
    larger = scales[scales >= 1]
    chosen = grids[scales == (larger.min() if len(larger) else scales.max())]
    rows, columns = chosen[chosen.prod(1).argmin()].tolist()
    return rows, columns


def fitted(height: int, width: int, high: int, wide: int) -> tuple[int, int]:
    """The largest size of a picture's shape within these sides."""
    by_width, by_height = wide / width, high / height
    if by_width < by_height:
        return max(1, min(math.floor(height * by_width), high)), wide
    return high, max(1, min(math.floor(width * by_height), wide))
