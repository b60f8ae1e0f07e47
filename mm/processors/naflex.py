"""SigLIP 2 NaFlex: a picture keeps its shape, has at most `max_num_patches` patches, and becomes one row.

Pool (`process`) and loop (`fill`). The three colours of a pixel are adjacent in a patch, because the encoder embeds
patches by a linear layer instead of a convolution.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mm.item import MediaItem, MediaOptions
from mm.processors.base import Encode, no_texts
from mm.processors.pictures import Pictures, picture_settings
from mm.processors.towers import PLACEHOLDER
from mm.transform.image import BILINEAR, Scale

AS_RELEASED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": BILINEAR}  # defaults
NEAR = 1e-5  # precision of the scale; a picture's size in patches may depend on this value
LARGEST = 100.0  # largest scale that is tried


class NaflexPictures(Pictures):
    """Processor of Siglip2Model."""

    writes_texts: ClassVar[bool] = False

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        vision = {"patch_size": 16, **config["vision_config"]}
        super().__init__(folder, {**config, "vision_config": vision, "image_token_id": PLACEHOLDER}, 0, encode)
        if not self.raw.get("do_resize", True):
            raise ValueError("images that are not scaled are not supported")
        self.patching = picture_settings({**AS_RELEASED, **self.raw}, self.patching)
        self.most = int(self.raw.get("max_num_patches", 256))

    def choices(self) -> tuple[Any, ...]:
        return (self.most,)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The largest scale at which the picture, rounded up to whole patches, has at most `most` patches."""
        most = self.most
        if options.max_pixels:
            most = max(1, min(most, options.max_pixels // self.patch**2))

        def patches(scale: float) -> tuple[int, int]:
            rows, columns = (max(1, math.ceil(side * scale / self.patch)) for side in (height, width))
            return rows, columns

        low, high = NEAR / 10, LARGEST
        while high - low >= NEAR:
            middle = (low + high) / 2
            low, high = (middle, high) if math.prod(patches(middle)) <= most else (low, middle)
        rows, columns = patches(low)
        return Scale(rows * self.patch, columns * self.patch, self.patching.resample)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        return by_pixel(self.tiles([item.data])), 1


def by_pixel(features: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same patches with the three colours of each pixel next to each other."""
    patches = features["pixel_values"]
    by_colour = patches.reshape(len(patches), 3, -1)
    return {**features, "pixel_values": np.ascontiguousarray(by_colour.swapaxes(1, 2)).reshape(len(patches), -1)}
