"""Phi-4-multimodal: Phi-4-mini that hears sounds of any length with its speech adapter. Pictures are not served.

The checkpoint keeps the decoder's matrices apart from the adapters for speech and vision. The loader adds the speech
adapter to the matrices, so texts without a sound are computed with it too; --language-model-only leaves it out.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from engine.checkpoint.section import Section
from engine.encoders.phi4mm_audio import Phi4AudioConfig, Phi4AudioTower, read_audio, rows
from engine.encoders.tower import by_modality
from engine.model_config import ModelConfig
from engine.models.family import Family
from engine.models.phi3 import Phi3, text
from engine.quant.merged import Adapter, merge

log = logging.getLogger(__name__)

AUDIO_ID = 200011  # <|endoftext11|>, as Microsoft's processor has it; no file says so
ADAPTED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
UNREAD = ("*.lora_?.vision.weight", "embed_tokens_extend.image_embed.*", "*.audio_projection.vision.*")
UNHEARD = ("*.lora_?.speech.weight", "embed_tokens_extend.*")


class Phi4MM(Phi3):
    """Text and sound in; text out."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        tower = config.towers.get("audio_processor")
        lora = Section(config.raw, "config.json").section("speech_lora")
        rank = 0
        self.table = replace(self.table, ignore=(*self.table.ignore, *UNREAD))
        if isinstance(tower, Phi4AudioConfig):
            self.audio = Phi4AudioTower(tower, dtype, device)
            self.towers = by_modality(self.audio)
            self.table = replace(self.table, rows=(*self.table.rows, *rows()))
            rank = lora.size("r")
            log.info("the speech adapter is part of the weights: texts without a sound are computed with it too")
        else:
            self.table = replace(self.table, ignore=(*self.table.ignore, *UNHEARD))
        scale = lora.number("lora_alpha") / lora.size("r")
        merge(
            self, Adapter(ADAPTED, rank, scale, "base_layer.weight", ("lora_A.speech.weight", "lora_B.speech.weight"))
        )


def media_token_ids(section: Section) -> dict[str, int]:
    """Of sounds."""
    return {"audio": section.integer("audio_token_id", AUDIO_ID)}


FAMILY = Family(
    name="Phi-4-multimodal",
    model=Phi4MM,
    text=text,
    towers={"audio_processor": read_audio},
    processor="phi4mm:Phi4MM",
    media_token_ids=media_token_ids,
)
