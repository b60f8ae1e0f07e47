"""LFM2-VL: a picture keeps its shape, in 64 to 256 rows; a large one becomes tiles and a view of the whole.

Pool (`process`) and loop (`fill`). Pictures come unscaled, because tiles and the whole view are scaled separately.

    slot of a small picture     <|image_start|> rows <|image_end|>
    slot of one of two tiles    <|image_start|> <|img_row_1_col_1|> rows <|img_row_1_col_2|> rows
                                <|img_thumbnail|> rows <|image_end|>
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.internvl import canvas
from mm.processors.naflex import AS_RELEASED, by_pixel
from mm.processors.pictures import AS_DECODED, Pictures, picture_settings
from mm.transform.image import Scale

START, END, WHOLE = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


class Lfm2Pictures(Pictures):
    """Processor of Lfm2VlForConditionalGeneration."""

    picture_bytes: int = AS_DECODED

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        vision = {"patch_size": 16, **config["vision_config"]}
        encode = functools.lru_cache(maxsize=1024)(encode)
        super().__init__(folder, {**config, "vision_config": vision}, picture_bytes, encode)
        raw = {**config, **self.raw}  # the first releases have these settings in config.json
        self.patching = picture_settings({**AS_RELEASED, **self.raw}, self.patching)
        self.unit = self.patch * int(config.get("downsample_factor", 2))  # pixels along a row's square
        self.rows = int(raw.get("min_image_tokens", 64)), int(raw.get("max_image_tokens", 256))
        self.tile = int(raw.get("tile_size", 512))
        self.tiles_of = int(raw.get("min_tiles", 2)), int(raw.get("max_tiles", 10))
        if not raw.get("do_image_splitting", True):
            self.tiles_of = 1, 1
        self.tolerance = float(raw.get("max_pixels_tolerance", 2.0))
        self.shows_whole = bool(raw.get("use_thumbnail", True))
        named = Path(folder) / "processor_config.json"
        words = json.loads(named.read_text(encoding="utf-8")) if named.is_file() else {}
        self.names = bool(words.get("use_image_special_tokens", config.get("use_image_special_tokens", True)))
        if self.tile % self.unit:
            raise ValueError(f"tile_size={self.tile} is no multiple of the {self.unit} pixels that become one row")

    def choices(self) -> tuple[Any, ...]:
        return self.unit, self.rows, self.tile, self.tiles_of, self.tolerance, self.shows_whole

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes + ((self.tiles_of[1] + 1) * self.tile**2 + self.rows[1] * self.unit**2) * 3 * 14 + (1 << 20)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The size of the view of the whole; the tiles follow from the picture's shape."""
        rows, columns = self.whole(height, width, self._most(options))
        return Scale(rows * self.unit, columns * self.unit, self.patching.resample)

    def _most(self, options: MediaOptions) -> int:
        """Most rows of the view of the whole."""
        return max(1, min(self.rows[1], (options.max_pixels or 1 << 62) // self.unit**2))

    def whole(self, height: int, width: int, most: int) -> tuple[int, int]:
        """(rows, columns) of units nearest to a picture's shape; their product is within bounds if possible."""
        unit, least = self.unit, min(self.rows[0], most)
        rows, columns = (max(1, round(side / unit)) for side in (height, width))
        if rows * columns > most:
            shrink = math.sqrt(height * width / (most * unit**2))
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns < least:
            grow = math.sqrt(least * unit**2 / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        if rows * columns > most:  # a picture one unit high or wide cannot shrink along that side
            rows, columns = min(rows, most), min(columns, most)
        return rows, columns

    def grid(self, height: int, width: int, options: MediaOptions) -> tuple[int, int]:
        """(columns, rows) of tiles; (1, 1): only a view of the whole, no tiles."""
        unit, (least, most) = self.unit, self.tiles_of
        area = math.prod(max(self.patch, round(side / unit) * unit) for side in (height, width))
        if options.max_pixels:
            most = min(most, options.max_pixels // self.tile**2)
        if most < max(least, 2) or area <= self.rows[1] * unit**2 * self.tolerance:
            return 1, 1
        return canvas(height, width, self.tile, least, most)

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        assert item.scale is not None, "pictures come as decoded"
        height, width = item.data.shape[:2]
        columns, rows = self.grid(height, width, options)
        parts = []
        if columns * rows > 1:
            tile = self.tile
            scaled = Scale(rows * tile, columns * tile, self.patching.resample).array(item.data)
            cut = scaled.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
            parts.append(self._part(list(cut), digest, {"tiles": np.array([rows, columns], np.int64)}))
        if not parts or self.shows_whole:
            own = hashlib.blake2b(digest + b"whole", digest_size=16).digest() if parts else digest
            parts.append(self._part([item.scale.array(item.data)], own, {}))
        return Processed("image", tuple(parts))

    def _part(self, pictures: list[np.ndarray], digest: bytes, more: dict[str, np.ndarray]) -> Part:
        features, count = by_pixel(self.tiles(pictures)), sum(picture[..., 0].size for picture in pictures)
        return Part("image", digest, count // self.unit**2, {**features, **more})

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        raise TypeError("an image has two parts: process makes them")

    def fill(self, processed: Processed) -> Filling:
        ids: list[int] = []
        runs = []
        self._write(ids, START)
        for part in processed.parts:
            rows, columns = part.features["tiles"].tolist() if "tiles" in part.features else (1, 1)
            each, own = part.num_tokens // (rows * columns), []
            for number in range(rows * columns):
                row, column = divmod(number, columns)
                if len(processed.parts) > 1 or rows * columns > 1:
                    tile = f"<|img_row_{row + 1}_col_{column + 1}|>"
                    self._write(ids, tile if "tiles" in part.features else WHOLE)
                own.append((len(ids), each))
                ids += [self.image_id] * each
            runs.append(tuple(own))
        self._write(ids, END)
        return Filling(np.array(ids, np.int32), tuple(runs))

    def _write(self, ids: list[int], text: str) -> None:
        if self.names:
            ids += self.encode(text)
