"""LLaVA-OneVision: pictures as in LLaVA-NeXT, with a bound on their rows; films whose frames are one tile each.

Pool (`process`) and loop (`fill`). A picture is cut into tiles only if it is the only picture of the prompt. Several
pictures become one tile each, padded to a square; a newline ends each. A frame's rows are interpolated to half as many
lines and columns; a newline ends a film.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions
from mm.processors.anyres import AnyRes, shrunk
from mm.processors.base import Encode, no_texts
from mm.processors.films import Films
from mm.processors.qwen_vl import token_id, triple
from mm.transform.image import Scale

BAND = 256  # lines of a picture that are padded at a time


class OneVision(AnyRes, Films):
    """Processor of LlavaOnevisionForConditionalGeneration."""

    usual_frames: ClassVar[int] = 32
    usual_side: ClassVar[int] = 384

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.most = int(str(config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))
        self.film_id = token_id(config, "video", 151_647)
        self.media_token_ids = frozenset((self.image_id, self.film_id))
        mean = triple(self.raw.get("image_mean") or self.patching.mean)  # used even if pixels are not normalised
        self.padding_colour = tuple(int(value * 255) for value in mean)  # colour that makes a picture square

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        whole = modality == "image" and options.num_pictures > 1
        return super().settings(modality, options) + (b"whole" if whole else b"")

    def cost(self, modality: Modality, item_bytes: int) -> int:
        if modality == "video":
            return Films.cost(self, modality, item_bytes)
        longest = math.isqrt(item_bytes * 100)  # lines of a square around a picture 300 times as long as wide
        return AnyRes.cost(self, modality, item_bytes) + longest * (self.side + BAND) * 3

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        if options.num_pictures == 1:
            return super().features(item, options)
        scale = Scale(self.side, self.side, self.patching.resample)
        tiles = self.tiles([squared(item.data, scale, self.padding_colour)])
        places = np.arange(self.grid**2 + 1, dtype=np.int64)[:, None]  # the newline follows the tile's rows
        return {**tiles, "places": places, "shares": np.ones(places.shape, np.float32)}, len(places)

    def film_features(self, tiles: dict[str, np.ndarray], frames: int) -> tuple[dict[str, np.ndarray], int]:
        places, shares = halved(frames, self.grid)
        return {**tiles, "places": places, "shares": shares}, len(places)


def squared(pixels: np.ndarray, scale: Scale, colour: tuple[int, ...]) -> np.ndarray:
    """A picture [height, width, 3] in the middle of a square of this colour, scaled.

    Pillow filters lines before columns, so lines are padded and filtered a band at a time, without allocating the
    square.
    """
    height, width = pixels.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    lines = np.empty((side, scale.width, 3), np.uint8)
    lines[:] = colour
    for start in range(0, height, BAND):
        band = pixels[start : start + BAND]
        padded = np.empty((len(band), side, 3), np.uint8)
        padded[:] = colour
        padded[:, left : left + width] = band
        narrow = Scale(len(band), scale.width, scale.resample).array(padded)
        lines[top + start : top + start + len(band)] = narrow
    return scale.array(lines)


@functools.lru_cache(maxsize=64)
def halved(frames: int, grid: int) -> tuple[np.ndarray, np.ndarray]:
    """Places int64 [tokens, 4]: indices of the frames' rows, the newline has the last index. Shares float32 [tokens,
    4].
    """
    half = -(-grid // 2)
    start, newline = np.arange(frames)[:, None] * grid**2, frames * grid**2
    places: list[np.ndarray] = []
    shares: list[np.ndarray] = []
    for lines, down in shrunk(np.arange(grid), half):
        for across, right in shrunk(np.arange(grid), half):
            place = (lines[:, None] * grid + across).reshape(1, -1)
            share = np.tile((down[:, None] * right).reshape(-1), frames)
            places.append(np.append(start + place, newline))
            shares.append(np.append(share, np.float32(not shares)))  # the first tap takes the newline
    out = np.stack(places, axis=1).astype(np.int64), np.stack(shares, axis=1).astype(np.float32)
    for array in out:
        array.flags.writeable = False
    return out
