"""Phi-4-multimodal: Phi-4-mini that hears sounds of any length. Pictures are not served.

The checkpoint keeps adapters of the decoder's matrices, one for each kind of media: requests that show a sound are
computed with the adapter for speech, texts with the matrices alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.checkpoint.section import Section
from engine.encoders.phi4mm_audio import Phi4AudioConfig, Phi4AudioTower, read_audio, rows
from engine.encoders.tower import by_modality
from engine.layers.adapted import Adapter
from engine.model_config import ModelConfig
from engine.models.adapting import adapt
from engine.models.family import Family
from engine.models.phi3 import Phi3, text
from engine.weights.table import Row

AUDIO_ID = 200011  # <|endoftext11|>, as Microsoft's processor has it; no file says so
ADAPTED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
UNREAD = ("*.lora_?.vision.weight", "embed_tokens_extend.image_embed.*", "*.audio_projection.vision.*")
UNHEARD = ("*.lora_?.speech.weight", "embed_tokens_extend.*")


class Phi4MM(Phi3):
    """Text and sound in; text out."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        tower = config.towers.get("audio_processor")
        self.table = replace(self.table, ignore=(*self.table.ignore, *UNREAD))
        adapters = []
        if isinstance(tower, Phi4AudioConfig):
            self.audio = Phi4AudioTower(tower, dtype, device)
            self.towers = by_modality(self.audio)
            self.table = replace(self.table, rows=(*self.table.rows, *rows()))
            lora = Section(config.raw, "config.json").section("speech_lora")
            scale = lora.number("lora_alpha") / lora.size("r")
            halves = "lora_A.speech.weight", "lora_B.speech.weight"
            adapters.append(Adapter("audio", ADAPTED, lora.size("r"), scale, halves))
        else:
            self.table = replace(self.table, ignore=(*self.table.ignore, *UNHEARD))
        if adapters:
            adapt(self, adapters)
        self.table = replace(self.table, rows=tuple(map(_beside_adapters, self.table.rows)))


def _beside_adapters(row: Row) -> Row:
    """Matrices have a module of their own below the one that holds the adapters too."""
    if row.target.endswith(".site"):
        return row
    return replace(row, names=tuple(f"{n}.base_layer" if n.endswith(ADAPTED) else n for n in row.names))


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
