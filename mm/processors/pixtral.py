"""Pixtral and Mistral 3: pictures keep their shape; a token ends each row, another token ends the last row.

Pool (`process`) and loop (`fill`).

    slot of a picture of 2 rows   [IMG] [IMG] [IMG] [IMG_BREAK] [IMG] [IMG] [IMG] [IMG_END]
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.pictures import Pictures, sides
from mm.transform.image import Scale


class Pixtral(Pictures):
    """Processor of Mistral3ForConditionalGeneration, and of LlavaForConditionalGeneration with Pixtral's encoder."""

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.merge = int(config.get("spatial_merge_size", 2)) if config.get("model_type") == "mistral3" else 1
        longest = config["vision_config"].get("max_image_size", 1024)  # the key of Mistral's own format
        self.longest = sides(self.raw.get("size"), longest)
        named = Path(folder) / "processor_config.json"
        words = json.loads(named.read_text(encoding="utf-8")) if named.is_file() else {}
        self.row_end = words.get("image_break_token", "[IMG_BREAK]")
        self.picture_end = words.get("image_end_token", "[IMG_END]")

    def choices(self) -> tuple[Any, ...]:
        return self.merge, self.longest

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        ratio = max(height / self.longest[0], width / self.longest[1])
        if options.max_pixels:
            ratio = max(ratio, math.sqrt(height * width / options.max_pixels))
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        unit = self.patch * self.merge
        rows, columns = (max(1, (side - 1) // unit + 1) for side in (height, width))
        return Scale(rows * unit, columns * unit, self.patching.resample)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        features = self.tiles([item.data])
        return features, len(features["pixel_values"]) // self.merge**2

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        rows, columns = (int(side) // self.merge for side in part.features["grid"])
        ids = np.full((rows, columns + 1), self.image_id, np.int32)
        ids[:, -1] = self.one(self.row_end)
        ids[-1, -1] = self.one(self.picture_end)
        runs = tuple((row * (columns + 1), columns) for row in range(rows))
        return Filling(ids.reshape(-1), (runs,))
