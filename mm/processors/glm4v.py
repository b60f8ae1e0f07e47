"""GLM-4.1V: pictures as grids of merged patches with three-axis positions, as in Qwen2-VL; sizes have other bounds.

Pool (`process`) and loop (`fill`, `positions`). Where its pixels are bounded, a picture counts as two equal frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.request import Modality
from mm.decode.frames import FilmPlan
from mm.errors import unsupported
from mm.item import MediaOptions
from mm.limits import MediaLimits
from mm.processors.base import read_processor_files
from mm.processors.qwen3_vl import film_scale
from mm.processors.qwen_vl import QwenVL, Vision, lowered, token_id
from mm.transform.image import PatchSettings, Scale

SETTINGS = PatchSettings(min_pixels=112 * 112, max_pixels=28 * 28 * 15_000)


class Glm4V(QwenVL):
    """Processor of Glm4vForConditionalGeneration and Glm4vMoeForConditionalGeneration."""

    modalities: frozenset[Modality] = frozenset(("image",))

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        """`picture_bytes` is 0: the tower cuts no pictures."""
        super().__init__(folder, config)
        files = read_processor_files(folder)
        self.vision = Vision(files.image, files.video, 0, SETTINGS)
        self._ids = {"image": token_id(config, "image", 151_343), "video": token_id(config, "video", 151_344)}
        self.media_token_ids = frozenset(self._ids.values())

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return b"glm4v" + super().settings(modality, options)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        settings = lowered(self.vision.image, options)
        return film_scale(settings.temporal_patch_size, height, width, settings)

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        raise unsupported("this model's films are not read here")
