"""LLaVA-OneVision: pictures as in LLaVA-NeXT, with a bound on their rows; films of frames that are one tile each.

Pool (`process`) and loop (`fill`). A frame's rows are shrunk to half as many lines and columns; a newline ends a film.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.request import Modality
from mm.processors.anyres import AnyRes, shrunk
from mm.processors.base import Encode, no_texts
from mm.processors.films import Films
from mm.processors.qwen_vl import token_id


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

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return (
            AnyRes.cost(self, modality, item_bytes) if modality == "image" else Films.cost(self, modality, item_bytes)
        )

    def shown(self, tiles: dict[str, np.ndarray], frames: int) -> tuple[dict[str, np.ndarray], int]:
        places, shares = halved(frames, self.grid)
        return {**tiles, "places": places, "shares": shares}, len(places)


@functools.lru_cache(maxsize=64)
def halved(frames: int, grid: int) -> tuple[np.ndarray, np.ndarray]:
    """Places int64 [tokens, 4] among the frames' rows, the newline behind them all, and shares float32 alike."""
    half = -(-grid // 2)
    start, newline = np.arange(frames)[:, None] * grid**2, frames * grid**2
    places: list[np.ndarray] = []
    shares: list[np.ndarray] = []
    for lines, down in shrunk(np.arange(grid), half):
        for across, right in shrunk(np.arange(grid), half):
            place = (lines[:, None] * grid + across).reshape(1, -1)
            share = np.tile((down[:, None] * right).reshape(-1), frames)
            places.append(np.append(start + place, newline))
            shares.append(np.append(share, np.float32(not shares)))  # the newline is taken by the first tap
    out = np.stack(places, axis=1).astype(np.int64), np.stack(shares, axis=1).astype(np.float32)
    for array in out:
        array.flags.writeable = False
    return out
