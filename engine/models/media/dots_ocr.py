"""dots.ocr: Qwen2 with positions that count tokens, and a vision tower for pages (engine/encoders/dots_ocr)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.base.model_config import ModelConfig
from engine.checkpoint.text import read_text
from engine.encoders.dots_ocr import ROWS, DotsVisionConfig, DotsVisionTower, read_vision
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.llama import Llama


class DotsOCR(Llama):
    """Text and pictures in; text out."""

    WEIGHTS = replace(Llama.WEIGHTS, rows=(*Llama.WEIGHTS.rows, *ROWS))

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = DotsVisionTower(vision, dtype, device) if isinstance(vision, DotsVisionConfig) else None
        self.towers = by_modality(self.vision)


FAMILY = Family(
    name="dots.ocr",
    architectures=("DotsOCRForCausalLM",),
    model=DotsOCR,
    text=partial(read_text, sliding="switch", qkv_bias=True),
    towers={"vision": read_vision},
    processor="dots_ocr:DotsOCR",
)
