"""dots.ocr: pages as grids of merged patches, as in Qwen2-VL, with positions that count tokens.

Pool (`process`) and loop (`fill`, `positions`). A slot becomes rows x columns / merge² placeholder tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaOptions
from mm.processors.base import Placed, read_processor_files
from mm.processors.qwen_vl import QwenVL, Vision, token_id
from mm.transform.image import PatchSettings

SETTINGS = PatchSettings(temporal_patch_size=1, max_pixels=11_289_600)


class DotsOCR(QwenVL):
    """Processor of DotsOCRForCausalLM."""

    modalities: frozenset[Modality] = frozenset(("image",))

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        """`picture_bytes` is 0: the encoder makes no patches."""
        super().__init__(folder, config)
        self.vision = Vision(read_processor_files(folder).image, {}, 0, SETTINGS)
        self._ids = {"image": token_id(config, "image", 151_665)}
        self.media_token_ids = frozenset(self._ids.values())

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return b"dots_ocr" + super().settings(modality, options)

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        return None, 0
