"""PaliGemma and Gemma 3: all of a picture is scaled to the tower's square.

Pool (`process`) and loop (`fill`). Gemma 3's template writes the token that begins a picture, and its tower averages
neighbours:

    slot of a picture   <start_of_image> I..I <end_of_image>
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.request import Modality
from mm.item import MediaItem, MediaOptions, Processed
from mm.processors.base import Encode, Filling, no_texts
from mm.processors.llava import Llava


class PaliGemma(Llava):
    """Processor of PaliGemmaForConditionalGeneration."""

    usual_side: ClassVar[int] = 224

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        if not self.whole:
            raise ValueError("pictures whose shorter side is scaled are not supported: size needs height and width")


class Gemma3(PaliGemma):
    """Processor of Gemma3ForConditionalGeneration, without crops of long pictures, as released."""

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        if self.raw.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan=true, crops of long pictures, is not supported: set it to false")
        self.tokens = int(config.get("mm_tokens_per_image") or 256)
        self.begin, self.end = (
            int(config.get(f"{name}_token_index") or default) for name, default in (("boi", 255_999), ("eoi", 256_000))
        )
        self.media_token_ids = frozenset((self.begin, self.image_id))

    def placeholder(self, modality: Modality) -> int:
        return self.begin

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        return super().features(item, options)[0], self.tokens

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        ids = np.array([self.begin, *[self.image_id] * part.num_tokens, self.end], np.int32)
        return Filling(ids, (((1, part.num_tokens),),))
