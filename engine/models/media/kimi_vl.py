"""Kimi-VL: MoonViT (engine/encoders/moonvit) before a DeepSeek-V3 decoder, which transformers computes.

Thread: device. Latent attention has no native file: the decoder is transformers' class with our attention and cache, as
for DeepSeek-V3 itself (engine/models/transformers_backend). transformers has no class for the whole; the tower is ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.encoders.moonvit import ROWS, MoonVitConfig, MoonVitTower, read_vision
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.transformers_backend import skeleton
from engine.models.transformers_backend.model import ModelWithRows, class_of, read_text

PLACEHOLDER = 163_605


class KimiVL(ModelWithRows):
    """Text and pictures in; text out."""

    through: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        if isinstance(vision, MoonVitConfig):
            self.vision = MoonVitTower(vision, dtype, device)
            self.towers = by_modality(self.vision)
            self._table = replace(self._table, rows=(*self._table.rows, *ROWS))

    def built(self) -> Any:
        raw = self.config.raw
        return skeleton.build(class_of(Section(raw, "config.json")), skeleton.decoder_of(raw))


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config."""
    return read_text(body, outer)


def media_token_ids(outer: Section) -> dict[str, int]:
    return {"image": outer.integer("media_placeholder_token_id", PLACEHOLDER)}


FAMILY = Family(
    name="Kimi-VL",
    architectures=("KimiVLForConditionalGeneration",),
    model=KimiVL,
    text=text,
    towers={"vision": read_vision},
    processor="kimi_vl:KimiPictures",
    media_token_ids=media_token_ids,
)
