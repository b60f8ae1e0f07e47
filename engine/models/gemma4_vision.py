"""Gemma 4 that sees: a tower of its own (engine/encoders/gemma4) before Gemma 4's decoder.

In the large models the tokens of a picture see each other where a layer has a window, and only there. Sounds are not
served: their tower is left out.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.ahead import Ahead
from engine.checkpoint.section import Section
from engine.encoders.gemma4 import ROWS, Gemma4VisionConfig, Gemma4VisionTower, read_vision
from engine.encoders.tower import by_modality
from engine.model_config import ModelConfig, TextConfig
from engine.models.both_ways import AHEAD
from engine.models.family import Family
from engine.models.gemma import KEYS
from engine.models.gemma4 import Gemma4
from engine.models.gemma4_text import text as decoder

MARKS = {"image": 258_880, "video": 258_884, "audio": 258_881}  # tokens of media, of a file that does not say
SOUND = ("audio_tower.*", "embed_audio.*")


class SeeingGemma4(Gemma4):
    """Text and pictures in; text out."""

    WEIGHTS = replace(Gemma4.WEIGHTS, rows=(*Gemma4.WEIGHTS.rows, *ROWS), ignore=(*Gemma4.WEIGHTS.ignore, *SOUND))

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = Gemma4VisionTower(vision, dtype, device) if isinstance(vision, Gemma4VisionConfig) else None
        self.towers = by_modality(self.vision)
        if self.beside_embed is not None:
            self.beside_embed.pad = config.raw["text_config"].get("pad_token_id") or 0
            self.beside_embed.marks = [config.raw.get(f"{kind}_token_id") or MARKS[kind] for kind in MARKS]


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder; files may say outside of its section that embedding and head are tied."""
    tied = outer.boolean("tie_word_embeddings", body.boolean("tie_word_embeddings", True))
    return decoder(body, Section({**outer.values, "tie_word_embeddings": tied}, outer.path))


def ahead(outer: Section) -> Ahead:
    """Whether the tokens of a picture see each other."""
    return "items" if outer.section("text_config").values.get(AHEAD) == "vision" else ""


FAMILY = Family(
    name="Gemma 4 with pictures",
    model=SeeingGemma4,
    text=text,
    towers={"vision": read_vision},
    processor="gemma4:Gemma4",
    keys=KEYS,
    ahead=ahead,
)
