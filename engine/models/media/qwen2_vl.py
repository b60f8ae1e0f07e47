"""Qwen2-VL: a Qwen2 decoder with three position axes, and a vision tower for pictures and video.

Thread: device. mm/splice computes the positions, [3, T]. The tower runs once per media item, and forward replaces the
placeholders' embeddings by the tower's rows. Qwen2.5-VL and Qwen3-VL derive from this model, with other towers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.encoders.qwen_vl.config import VisionConfig, read_vision2
from engine.encoders.qwen_vl.names import QWEN2, Names, rows
from engine.encoders.qwen_vl.tower import QwenVisionTower
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table


def seeing(names: Names, *more: Row) -> Table:
    """WEIGHTS of a decoder with Qwen's tower, and `more` rows of the decoder.

    Released names: model.layers, visual; transformers 5: model.language_model.layers, model.visual.
    """
    return Table(
        rows=(*DECODER_ROWS, *more, *rows("vision", "visual", names)),
        prefixes=("model.", "language_model."),
        ignore=DECODER_IGNORE,
    )


class Qwen2VL(Llama):
    """Text, image and video in; text out."""

    WEIGHTS = seeing(QWEN2)

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = QwenVisionTower(vision, dtype, device) if isinstance(vision, VisionConfig) else None
        self.towers = by_modality(self.vision)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; files of transformers 4 have tie_word_embeddings in the decoder's section."""
    rope = RopeDefaults(1_000_000.0, sections=(16, 24, 24))
    read = read_text(body, outer, sliding="switch", rope=rope, qkv_bias=True)
    return replace(read, tie_embeddings=read.tie_embeddings or body.boolean("tie_word_embeddings", False))


FAMILY = Family(
    name="Qwen2-VL",
    architectures=("Qwen2VLForConditionalGeneration",),
    model=Qwen2VL,
    text=text,
    towers={"vision": read_vision2},
    processor="qwen_vl:QwenVL",
)
