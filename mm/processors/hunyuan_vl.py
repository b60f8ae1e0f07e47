"""HunyuanOCR: a picture of any size as lines of merged patches, between a first and a last token.

Pool (`process`) and loop (`fill`, `positions`). In: a picture, scaled as planned. Out: its patches row by row. All axes
of positions count the prompt's tokens; inside a picture, the last three axes hold column, line and number of the
picture. A newline ends each line of blocks and counts as a column.

    tokens   a  I  I I I I I I  I  b        picture of 2 x 2 blocks
    place    0  1  2 3 4 5 6 7  8  9
    column   0  1  0 1 2 0 1 2  8  9
    line     0  1  0 0 0 1 1 1  8  9
    picture  0  1  0 0 0 0 0 0  8  9
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions
from mm.processors.base import Encode, Placed, no_texts
from mm.processors.pictures import Pictures
from mm.processors.qwen_vl import lowered, token_id
from mm.transform.image import BICUBIC, Scale, patchify


class HunYuanVL(Pictures):
    """Processor of HunYuanVLForConditionalGeneration."""

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.image_id = token_id(config, "image", 120_120)
        self.media_token_ids = frozenset((self.image_id,))
        size, vision = self.raw.get("size") or {}, config["vision_config"]
        most = int(vision.get("max_vit_seq_len") or 16_384) * self.patch**2
        # The released code scales by this filter and ignores the file's setting.
        self.patching = replace(self.patching, resample=BICUBIC)
        self.bounds = replace(
            self.patching,
            merge_size=int(vision.get("spatial_merge_size", 2)),
            min_pixels=int(self.raw.get("min_pixels") or size.get("shortest_edge") or 512 * 512),
            max_pixels=min(int(self.raw.get("max_pixels") or size.get("longest_edge") or 2048 * 2048), most),
        )
        text = config.get("text_config") or config
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        self.axes = len(rope.get("mrope_section") or rope.get("xdrope_section") or ())

    def choices(self) -> tuple[Any, ...]:
        return self.bounds.merge_size, self.bounds.min_pixels, self.bounds.max_pixels

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return super().settings(modality, options) + repr(options.min_pixels).encode()

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        return lowered(self.bounds, options).scale(height, width)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        patches, grid = patchify(item.data[None], self.patching)
        height, width = (side // self.bounds.merge_size for side in grid[1:])
        return {"pixel_values": patches, "grid_thw": np.array([grid], np.int64)}, height * (width + 1) + 2

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        if not placed:
            return None, 0
        out = np.tile(np.arange(length, dtype=np.int32), (self.axes, 1))
        for number, item in enumerate(placed):
            (part,), (((start, count),),) = item.processed.parts, item.filling.runs
            columns = int(part.features["grid_thw"][0, 2]) // self.bounds.merge_size + 1
            first, cells = item.start + start + 1, count - 2
            line, column = np.divmod(np.arange(cells), columns)
            out[-3:, first : first + cells] = column, line, np.full(cells, number)
        return out, 0
