"""GLM-4.5V: GLM-4.5's decoder with three position axes, and GLM-4.1V's tower."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.encoders.glm4v import ROWS, GlmVisionConfig, GlmVisionTower, read_vision
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text import glm4_moe
from engine.models.text.sparse import Sparse

ROPE = RopeDefaults(partial=0.5, sections=(8, 12, 12))
TEXT = Sparse.WEIGHTS


class Glm4VMoe(Sparse):
    """Text, pictures and video in; text out."""

    WEIGHTS = replace(TEXT, rows=(*TEXT.rows, *ROWS), prefixes=("model.", "language_model."))

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = GlmVisionTower(vision, dtype, device) if isinstance(vision, GlmVisionConfig) else None
        self.towers = by_modality(self.vision)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; by default queries, keys and values have biases."""
    body = Section({"attention_bias": True, **body.values}, body.path, body.outer)
    read = glm4_moe.text(body, outer, ROPE)
    return replace(read, tie_embeddings=read.tie_embeddings or body.boolean("tie_word_embeddings", False))


FAMILY = Family(
    name="GLM-4.5V",
    architectures=("Glm4vMoeForConditionalGeneration",),
    model=Glm4VMoe,
    text=text,
    towers={"vision": read_vision},
    processor="glm4v:Glm4V",
)
