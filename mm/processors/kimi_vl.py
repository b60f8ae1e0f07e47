"""Kimi-VL: a picture keeps its size up to a number of patches, and is filled up with black to whole blocks.

Pool (`process`) and loop (`fill`). A slot becomes one placeholder per block of 2 x 2 patches.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from mm.errors import unsupported
from mm.item import MediaItem, MediaOptions
from mm.processors.base import Encode, no_texts
from mm.processors.pictures import Pictures, picture_settings
from mm.transform.image import Scale

LONGEST = 512  # patches along a side are fewer: the tower has no more positions
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


class KimiPictures(Pictures):
    """Processor of KimiVLForConditionalGeneration."""

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        placeholder = int(config.get("media_placeholder_token_id") or 163_605)
        super().__init__(folder, {**config, "image_token_id": placeholder}, picture_bytes, encode)
        if not self.raw.get("pad_input", True):
            raise ValueError("pad_input=false; pictures are served as they are filled up, and not cut")
        self.patching = picture_settings({**HALF, **self.raw}, self.patching)
        self.most = int(self.raw.get("in_token_limit", 4096))
        self.merge = int((self.raw.get("merge_kernel_size") or [2])[0])

    def choices(self) -> tuple[Any, ...]:
        return self.most, self.merge

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The size before the picture is filled up: whole patches inside the picture are bounded."""
        patch = self.patch
        most = min(self.most, max(1, (options.max_pixels or 1 << 62) // patch**2))
        count = (width // patch) * (height // patch)
        if count > most:
            shrink = math.sqrt(most / count)
            height, width = max(1, int(height * shrink)), max(1, int(width * shrink))
        if max(self.blocks(height), self.blocks(width)) * self.merge >= LONGEST:
            raise unsupported(
                f"a picture of {width} x {height} pixels has more than {LONGEST - 1} patches of {patch} pixels along a "
                "side; cut it, or make it smaller"
            )
        return Scale(height, width, self.patching.resample)

    def blocks(self, length: int) -> int:
        """Blocks along a side of this many pixels."""
        return -(-length // (self.patch * self.merge))

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        height, width = item.data.shape[:2]
        rows, columns = self.blocks(height), self.blocks(width)
        unit = self.patch * self.merge
        filled = np.zeros((rows * unit, columns * unit, 3), np.uint8)
        filled[:height, :width] = item.data
        return self.tiles([filled]), rows * columns
