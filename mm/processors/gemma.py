"""PaliGemma and Gemma 3: a whole picture is scaled to the encoder's square.

Pool (`process`) and loop (`fill`). Gemma 3's template writes the token that begins a picture, and its encoder averages
neighbouring patches. With pan and scan, a long picture becomes a view of the whole and crops along its longer side; the
renderer writes PREAMBLE before the slot (server/render/preambles):

    slot of a picture   <start_of_image> I..I <end_of_image>
    of a long picture   <start_of_image> I..I <end_of_image> CROPS <start_of_image> I..I <end_of_image> BETWEEN ...
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.llava import Llava
from mm.transform.image import Scale

PREAMBLE = "Here is the original image "
CROPS, BETWEEN = "\n\n and here are some crops to help you see better \n\n", "\n\n \n\n"


class PaliGemma(Llava):
    """Processor of PaliGemmaForConditionalGeneration."""

    usual_side: ClassVar[int] = 224

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        if not self.whole:
            raise ValueError("images whose shorter side is scaled are not supported: size needs height and width")


class Gemma3(PaliGemma):
    """Processor of Gemma3ForConditionalGeneration."""

    writes_texts: ClassVar[bool] = True

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.crops = bool(self.raw.get("do_pan_and_scan"))
        self.least = int(self.raw.get("pan_and_scan_min_crop_size") or 256)  # pixels along a side of a crop
        self.most = int(self.raw.get("pan_and_scan_max_num_crops") or 4)
        self.ratio = float(self.raw.get("pan_and_scan_min_ratio_to_activate") or 1.2)
        if self.least < 1 or self.most < 1 or self.ratio <= 1:
            raise ValueError(
                f"pan_and_scan_min_crop_size={self.least}, pan_and_scan_max_num_crops={self.most}, "
                f"pan_and_scan_min_ratio_to_activate={self.ratio}: sizes of at least 1 and a ratio above 1 are needed"
            )
        self.tokens = int(config.get("mm_tokens_per_image") or 256)
        self.begin, self.end = (
            int(config.get(f"{name}_token_index") or default) for name, default in (("boi", 255_999), ("eoi", 256_000))
        )
        self.media_token_ids = frozenset((self.begin, self.image_id))

    def placeholder(self, modality: Modality) -> int:
        return self.begin

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        cut = (self.least, self.most, self.ratio) if self.crops or options.do_pan_and_scan else ()
        return super().settings(modality, options) + repr(cut).encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        tile = self.side**2 * 3
        crops = 0 if item_bytes == tile else (1 + self.most) * tile * 9  # cropped pictures are not scaled to a tile
        return super().cost(modality, item_bytes) + crops

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The size of a picture that is cropped does not change."""
        return (
            Scale(height, width) if self.boxes(height, width, options) else super().plan_image(height, width, options)
        )

    def boxes(self, height: int, width: int, options: MediaOptions) -> list[tuple[slice, slice]]:
        """Lines and columns of each crop of a picture of this size; empty if the picture is not cropped."""
        long, short = max(height, width), min(height, width)
        if not (self.crops or options.do_pan_and_scan) or long / short < self.ratio:
            return []
        count = min(math.floor(long / self.least), math.floor(long / short + 0.5))
        step = math.ceil(long / min(max(count, 2), self.most))
        if min(step, short) < self.least:
            return []
        pieces = [slice(start, start + step) for start in range(0, long, step)]
        return [(slice(None), piece) if width >= height else (piece, slice(None)) for piece in pieces]

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        processed = super().process(item, digest, options)
        return replace(processed, preamble=PREAMBLE) if processed.parts[0].num_tokens > self.tokens else processed

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        height, width = item.data.shape[:2]
        pictures = [item.data, *(item.data[box] for box in self.boxes(height, width, options))]
        scale = Scale(*self.size, self.patching.resample)
        return self.tiles([scale.array(picture) for picture in pictures]), len(pictures) * self.tokens

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        ids: list[int] = []
        runs = []
        for number in range(part.num_tokens // self.tokens):
            if number:
                ids += self.encode(CROPS if number == 1 else BETWEEN)
            runs.append((len(ids) + 1, self.tokens))
            ids += [self.begin, *[self.image_id] * self.tokens, self.end]
        return Filling(np.array(ids, np.int32), (tuple(runs),))
