"""Gemma 4: pictures keep their shape and become as many rows as the checkpoint allows, whatever their size.

Pool (`process`) and loop (`fill`).

    slot of a picture   <|image>  I I I I  <image|>
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.pictures import Pictures, picture_settings
from mm.processors.qwen_vl import token_id
from mm.transform.image import Scale


class Gemma4(Pictures):
    """Processor of Gemma4ForConditionalGeneration."""

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, {**config, "vision_config": {"patch_size": 16, **config["vision_config"]}}, 0, encode)
        self.raw = {"do_normalize": False, **self.raw}  # as released: pixels from 0 to 1
        self.patching = picture_settings(self.raw, self.patching)
        self.pool = int(config["vision_config"].get("pooling_kernel_size", 3))
        self.rows = int(self.raw.get("max_soft_tokens") or 280)
        self.image_id = token_id(config, "image", 258_880)
        self.media_token_ids = frozenset((self.image_id,))
        self.begin, self.end = int(config.get("boi_token_id") or 255_999), int(config.get("eoi_token_id") or 258_882)

    def choices(self) -> tuple[Any, ...]:
        return self.pool, self.rows

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The largest size of this shape that is no more than so many squares of patches."""
        unit, most = self.patch * self.pool, self.rows
        if options.max_pixels:
            most = max(1, min(most, options.max_pixels // unit**2))
        ratio = math.sqrt(most * unit**2 / (height * width))
        rows, columns = math.floor(ratio * height / unit), math.floor(ratio * width / unit)
        if not rows:
            rows, columns = 1, min(max(1, width // height), most)
        elif not columns:
            rows, columns = min(max(1, height // width), most), 1
        return Scale(rows * unit, columns * unit, self.patching.resample)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        features = self.tiles([item.data])
        return features, len(features["pixel_values"]) // self.pool**2

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        ids = np.array([self.begin, *[self.image_id] * part.num_tokens, self.end], np.int32)
        return Filling(ids, (((1, part.num_tokens),),))
