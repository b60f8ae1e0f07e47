"""GLM-4V: pictures as squares of one size; the tokens of a picture's patches share one position.

Pool (`process`) and loop (`fill`, `positions`). In: a picture, stretched to the encoder's square. Out: its patches row
by row. The encoder also makes the rows of the tokens that begin and end a picture. The model was released with one
picture before the text of its message; positions of further pictures are counted like the first's. After
tokenization_chatglm.py and modeling_chatglm.py in https://huggingface.co/THUDM/glm-4v-9b;
https://github.com/vllm-project/vllm/pull/5358 has the same positions.

    tokens     a  <|begin_of_image|>  patch patch patch patch  <|end_of_image|>  b
    position   0          1             2     2     2     2            3         4
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mm.item import MediaItem, MediaOptions
from mm.processors.base import Encode, Placed, no_texts
from mm.processors.pictures import Pictures, tower_side
from mm.transform.image import Scale

MERGE = 2  # patches along a side that become one token
ROWS = 3  # axes of positions; all are equal


class ChatGLM(Pictures):
    """Processor of ChatGLMModel and GLM4VForCausalLM."""

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        super().__init__(folder, config, picture_bytes, encode)
        self.image_id = int(config["boi_token_id"])
        self.media_token_ids = frozenset((self.image_id,))
        self.side = tower_side(config, 1120)

    def choices(self) -> tuple[Any, ...]:
        return (self.side,)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        return Scale(self.side, self.side, self.patching.resample)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        features = self.tiles([item.data])
        return features, len(features["pixel_values"]) // MERGE**2 + 2

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        if not placed:
            return None, 0
        steps = np.ones(length, np.int32)
        steps[0] = 0
        for item in placed:
            (((start, count),),) = item.filling.runs
            first = item.start + start
            steps[first + 2 : first + count - 1] = 0
        row = np.cumsum(steps, dtype=np.int32)
        return np.tile(row, (ROWS, 1)), int(row[-1]) + 1 - length
