"""Phi-4-multimodal in Microsoft's layout: Phi-4-mini that takes pictures, and audio of any length.

The checkpoint has adapters of the decoder's matrices. Requests with a picture use the vision adapter, whether or not
they also have audio. Requests with audio only use the speech adapter. Text requests use no adapter.
engine/models/media/phi4_multimodal.py is the same model with transformers' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from engine.base.model_config import ModelConfig
from engine.base.request import Modality
from engine.checkpoint.section import Section
from engine.encoders import phi4mm_audio, phi4mm_vision
from engine.encoders.phi4mm_audio import Phi4AudioConfig, Phi4AudioTower
from engine.encoders.phi4mm_vision import Phi4VisionConfig, Phi4VisionTower
from engine.encoders.tower import by_modality
from engine.layers.adapted import Adapter
from engine.models.base.adapting import adapt
from engine.models.base.family import Family
from engine.models.text.phi3 import Phi3, text
from engine.weights.table import Row

IDS = {"image": 200010, "audio": 200011}  # <|endoftext10|> and 11, from Microsoft's processor; no file names them
ADAPTED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
NAMES: dict[Modality, str] = {"image": "vision", "audio": "speech"}  # names of adapters
UNSEEN = (
    "*.lora_?.vision.weight",
    "embed_tokens_extend.image_embed.*",
    "*.audio_projection.vision.*",
    "*_for_vision_speech.*",
)
UNREAD_AUDIO = ("*.lora_?.speech.weight", "embed_tokens_extend.audio_embed.*")


class Phi4MM(Phi3):
    """Text, pictures and audio in; text out."""

    RENAMED: ClassVar[Mapping[str, str]] = {}  # part of a released name -> its name in this layout
    MATRIX: ClassVar[str] = ".base_layer"  # the submodule that holds the matrix, inside the module with the adapters

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        rows: list[Row] = []
        ignore = [*self.table.ignore]
        media: list[Modality] = []
        for tower in config.towers.values():  # pictures first: their adapter wins
            if isinstance(tower, Phi4VisionConfig):
                self.vision = Phi4VisionTower(tower, dtype, device)
                rows += phi4mm_vision.rows()
                ignore += phi4mm_vision.unread(tower)
                media.append("image")
            elif isinstance(tower, Phi4AudioConfig):
                self.audio = Phi4AudioTower(tower, dtype, device, pictures=len(media))
                rows += phi4mm_audio.rows()
                media.append("audio")
        self.towers = by_modality(self.vision, self.audio)
        ignore += UNSEEN if self.vision is None else ()
        ignore += UNREAD_AUDIO if self.audio is None else ()
        self.table = replace(self.table, ignore=tuple(ignore))
        if adapters := self.adapters_of(media):
            adapt(self, adapters)
        matrices = [self._matrix(row) for row in self.table.rows]
        self.table = replace(self.table, rows=(*matrices, *map(self._renamed, rows)))

    def adapters_of(self, media: list[Modality]) -> list[Adapter]:
        """The adapters for the modalities of the towers that are built; config.json has their sizes."""
        raw = Section(self.config.raw, "config.json")
        return [adapter(raw.section(f"{NAMES[kind]}_lora"), kind) for kind in media]

    def _matrix(self, row: Row) -> Row:
        if row.target.endswith(".site"):
            return row
        return replace(row, names=tuple(name + self.MATRIX * name.endswith(ADAPTED) for name in row.names))

    def _renamed(self, row: Row) -> Row:
        names = list(row.names)
        for released, theirs in self.RENAMED.items():
            names = [name.replace(released, theirs) for name in names]
        return replace(row, names=tuple(names))


def adapter(section: Section, media: Modality) -> Adapter:
    """Reads an adapter from a section with rank and scale."""
    rank, name = section.size("r"), NAMES[media]
    halves = f"lora_A.{name}.weight", f"lora_B.{name}.weight"
    return Adapter(media, ADAPTED, rank, section.number("lora_alpha") / rank, halves)


def media_token_ids(section: Section) -> dict[str, int]:
    """The placeholder tokens of pictures and audio."""
    return {kind: section.integer(f"{kind}_token_id", token) for kind, token in IDS.items()}


FAMILY = Family(
    name="Phi-4-multimodal",
    architectures=("Phi4MMForCausalLM",),
    model=Phi4MM,
    text=text,
    towers={"embd_layer": phi4mm_vision.read_released, "audio_processor": phi4mm_audio.read_audio},
    processor="phi4mm:Phi4MM",
    media_token_ids=media_token_ids,
)
