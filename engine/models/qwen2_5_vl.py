"""Qwen2.5-VL: a Qwen2 decoder with three position axes, and a vision tower for pictures and films.

Thread: device. Positions come in ready made, [3, T] (mm/splice counts them); the tower runs once per media item, and
forward puts its rows in place of the placeholders' embeddings. The tower's queries, keys and values come as one tensor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.encoders.qwen_vl import tower as qwen_vl
from engine.encoders.qwen_vl.config import VisionConfig, read_vision
from engine.encoders.tower import by_modality
from engine.model_config import ModelConfig, TextConfig
from engine.models.family import Family
from engine.models.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table


class Qwen25VL(Llama):
    """Text, image and video in; text out."""

    WEIGHTS = Table(
        rows=(*DECODER_ROWS, *qwen_vl.rows("vision", "visual", joined_qkv=True)),
        # Released: model.layers, visual; by transformers 5: model.language_model.layers, model.visual.
        prefixes=("model.", "language_model."),
        ignore=DECODER_IGNORE,
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = qwen_vl.QwenVisionTower(vision, dtype, device) if isinstance(vision, VisionConfig) else None
        self.towers = by_modality(self.vision)


def _text(body: Section, outer: Section) -> TextConfig:
    """The decoder; files that transformers 4 wrote have tie_word_embeddings beside the decoder's sizes."""
    rope = RopeDefaults(1_000_000.0, sections=(16, 24, 24))
    text = read_text(body, outer, sliding="switch", rope=rope, qkv_bias=True)
    return replace(text, tie_embeddings=text.tie_embeddings or body.boolean("tie_word_embeddings", False))


FAMILY = Family(
    name="Qwen2.5-VL",
    model=Qwen25VL,
    text=_text,
    towers={"vision": partial(read_vision, joined_qkv=True)},
    processor="qwen_vl:QwenVL",
)
