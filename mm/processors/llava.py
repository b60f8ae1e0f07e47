"""LLaVA 1.5: a picture's shorter side is scaled to the encoder's size and the middle is cut out; or the whole is
scaled.

Pool (`process`) and loop (`fill`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mm.item import MediaItem, MediaOptions
from mm.processors.base import Encode, no_texts
from mm.processors.pictures import Pictures, sides, tower_side
from mm.transform.image import Scale


class Llava(Pictures):
    """Processor of LlavaForConditionalGeneration with CLIP or SigLIP."""

    writes_texts: ClassVar[bool] = False
    usual_side: ClassVar[int] = 336  # side of the encoder's pictures if no file gives one

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        raw, self.side = self.raw, tower_side(config, self.usual_side)
        if raw.get("do_pad") or not raw.get("do_resize", True):
            raise ValueError("images that are padded to squares, or not scaled, are not supported")
        size = raw.get("size", {"shortest_edge": self.side})
        self.whole = isinstance(size, dict) and "height" in size  # scale the whole picture, without cropping
        self.size = sides(size, self.side)
        crops = raw.get("do_center_crop", not self.whole)
        seen = sides(raw.get("crop_size"), self.side) if crops else self.size
        if seen != (self.side, self.side) or min(self.size) < self.side or not (crops or self.whole):
            raise ValueError(f"images become {seen[0]} x {seen[1]} pixels; the tower reads {self.side} x {self.side}")

    def choices(self) -> tuple[Any, ...]:
        return self.whole, self.size, self.side

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        if self.whole:
            return Scale(*self.size, self.patching.resample)
        short = self.size[0]
        if height <= width:
            return Scale(short, int(short * width / height), self.patching.resample)
        return Scale(int(short * height / width), short, self.patching.resample)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        top, left = ((have - self.side) // 2 for have in item.data.shape[:2])
        features = self.tiles([item.data[top : top + self.side, left : left + self.side]])
        return features, len(features["pixel_values"])
