"""GLM-4.1V: GLM-4-0414 with three position axes, and a vision tower (engine/encoders/glm4v)."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.encoders.glm4v import ROWS, GlmVisionConfig, GlmVisionTower, read_vision
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.glm4 import Glm4

ROPE = RopeDefaults(sections=(8, 12, 12), interleaved=True)


class Glm4V(Glm4):
    """Text, pictures and video in; text out."""

    WEIGHTS = replace(Glm4.WEIGHTS, rows=(*Glm4.WEIGHTS.rows, *ROWS), prefixes=("model.", "language_model."))

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = GlmVisionTower(vision, dtype, device) if isinstance(vision, GlmVisionConfig) else None
        self.towers = by_modality(self.vision)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder; its queries, keys and values have biases."""
    read = read_text(body, outer, rope=ROPE, eps=1e-5, qkv_bias=True, o_bias=False, joined_mlp=True)
    read = replace(read, tie_embeddings=read.tie_embeddings or body.boolean("tie_word_embeddings", False))
    return every_layer(read, post_norms=True)


FAMILY = Family(
    name="GLM-4.1V",
    architectures=("Glm4vForConditionalGeneration",),
    model=Glm4V,
    text=text,
    towers={"vision": read_vision},
    processor="glm4v:Glm4V",
)
