"""Gemma 4 with pictures and audio: its own towers (engine/encoders/gemma4, gemma4_audio) before Gemma 4's decoder.

In the large models the tokens of a picture, or of a video frame, attend to each other in both directions, but only in
layers with a window. The small models take audio.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.bidirectional import Bidirectional
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.encoders.gemma4 import ROWS, Gemma4VisionConfig, Gemma4VisionTower, read_vision
from engine.encoders.gemma4_audio import ROWS as AUDIO_ROWS
from engine.encoders.gemma4_audio import Gemma4AudioConfig, Gemma4AudioTower, read_audio
from engine.encoders.tower import by_modality
from engine.models.base.both_ways import USE_BIDIRECTIONAL
from engine.models.base.family import Family
from engine.models.text.gemma import KEYS
from engine.models.text.gemma4_config import text as decoder
from engine.models.text.gemma4_text import Gemma4

MARKS = {"image": 258_880, "video": 258_884, "audio": 258_881}  # default placeholder tokens


class SeeingGemma4(Gemma4):
    """Text, pictures, video and audio in; text out."""

    WEIGHTS = replace(Gemma4.WEIGHTS, rows=(*Gemma4.WEIGHTS.rows, *ROWS, *AUDIO_ROWS))

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision, audio = config.towers.get("vision"), config.towers.get("audio")
        self.vision = Gemma4VisionTower(vision, dtype, device) if isinstance(vision, Gemma4VisionConfig) else None
        self.audio = Gemma4AudioTower(audio, dtype, device) if isinstance(audio, Gemma4AudioConfig) else None
        self.towers = by_modality(self.vision, self.audio)
        if self.per_layer_embed is not None:
            self.per_layer_embed.pad = config.raw["text_config"].get("pad_token_id") or 0
            self.per_layer_embed.marks = [config.raw.get(f"{kind}_token_id") or MARKS[kind] for kind in MARKS]


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; tie_word_embeddings may be outside the decoder's section."""
    tied = outer.boolean("tie_word_embeddings", body.boolean("tie_word_embeddings", True))
    return decoder(body, Section({**outer.values, "tie_word_embeddings": tied}, outer.path))


def bidirectional(outer: Section) -> Bidirectional:
    """Whether the tokens of a picture see each other."""
    return "items" if outer.section("text_config").values.get(USE_BIDIRECTIONAL) == "vision" else ""


def media_token_ids(outer: Section) -> dict[str, int]:
    """The placeholder tokens that templates write for items."""
    return {kind: outer.integer(f"{kind}_token_id", mark) for kind, mark in MARKS.items()}


FAMILY = Family(
    name="Gemma 4 with towers",
    architectures=("Gemma4ForConditionalGeneration",),
    model=SeeingGemma4,
    text=text,
    towers={"vision": read_vision, "audio": read_audio},
    processor="gemma4:Gemma4",
    keys=KEYS,
    bidirectional=bidirectional,
    media_token_ids=media_token_ids,
)
