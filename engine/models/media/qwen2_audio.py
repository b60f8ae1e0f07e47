"""Qwen2-Audio: a Qwen2 decoder that takes audio. A tower turns each item into rows that replace the placeholders."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from engine.base.model_config import ModelConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import complete, read_text
from engine.encoders import whisper
from engine.encoders.qwen2_audio import PROJECTION, Qwen2AudioConfig, Qwen2AudioTower
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.media.seeing import outside
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table


def audio(section: Section) -> Qwen2AudioConfig:
    """The tower's config; its rows have the decoder's width."""
    encoder = whisper.read_audio(section)
    width = complete(outside(section).section("text_config")).size("hidden_size")
    given = {field.name: getattr(encoder, field.name) for field in dataclasses.fields(encoder)}
    return Qwen2AudioConfig(**given, output_dim=width)


class Qwen2Audio(Llama):
    """Text and audio in; text out."""

    WEIGHTS = Table(
        rows=(*DECODER_ROWS, *whisper.rows("audio", "audio_tower"), PROJECTION),
        # Released names: language_model.model.layers; transformers 5: model.language_model.layers.
        prefixes=("model.", "language_model.", "model."),
        ignore=DECODER_IGNORE,
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        tower = config.towers.get("audio")
        self.audio = Qwen2AudioTower(tower, dtype, device) if isinstance(tower, Qwen2AudioConfig) else None
        self.towers = by_modality(self.audio)


FAMILY = Family(
    name="Qwen2-Audio",
    architectures=("Qwen2AudioForConditionalGeneration",),
    model=Qwen2Audio,
    text=partial(read_text, sliding="switch", qkv_bias=True),
    towers={"audio": audio},
    processor="qwen2_audio:Qwen2Audio",
)
