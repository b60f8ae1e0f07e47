"""CLIP and SigLIP: a picture is one input, scaled and cut as for LLaVA, and becomes one row.

Pool (`process`) and loop (`fill`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mm.item import MediaItem, MediaOptions
from mm.processors.base import Encode, no_texts
from mm.processors.llava import Llava

PLACEHOLDER = 0  # the id of any token: a picture is a prompt of its own, and the model ignores the token


class TowerPictures(Llava):
    """Processor of CLIPModel and SiglipModel."""

    usual_side: ClassVar[int] = 224

    def __init__(
        self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
    ) -> None:
        usual = 32 if config["vision_config"].get("model_type") == "clip_vision_model" else 16
        vision = {"patch_size": usual, **config["vision_config"]}
        super().__init__(folder, {**config, "vision_config": vision, "image_token_id": PLACEHOLDER}, 0, encode)

    def features(self, item: MediaItem, options: MediaOptions) -> tuple[dict[str, np.ndarray], int]:
        features, _ = super().features(item, options)
        return features, 1
