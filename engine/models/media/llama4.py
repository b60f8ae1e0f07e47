"""Llama 4 with pictures: its own tower (engine/encoders/llama4) before Llama 4's decoder."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.model_config import ModelConfig
from engine.encoders.llama4 import ROWS, Llama4VisionConfig, Llama4VisionTower, read_vision
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.llama4_text import Llama4, text


class SeeingLlama4(Llama4):
    """Text and pictures in; text out."""

    WEIGHTS = replace(Llama4.WEIGHTS, rows=(*Llama4.WEIGHTS.rows, *ROWS))

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = Llama4VisionTower(vision, dtype, device) if isinstance(vision, Llama4VisionConfig) else None
        self.towers = by_modality(self.vision)


FAMILY = Family(
    name="Llama 4 with pictures",
    architectures=("Llama4ForConditionalGeneration",),
    model=SeeingLlama4,
    text=text,
    towers={"vision": read_vision},
    processor="llama4:Llama4",
)
